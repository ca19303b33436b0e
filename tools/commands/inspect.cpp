#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/config/adapter_folder.h"
#include "ballast/config/config.h"
#include "ballast/core/error.h"
#include "ballast/core/units.h"
#include "ballast/formats/export.h"
#include "ballast/formats/weight_files.h"
#include "ballast/setup/translate.h"
#include "ballast/text/json.h"

#include "src/formats/folder_layout.h"
#include "src/train/run_directory.h"
#include "tools/command_line.h"
#include "tools/commands/inspected.h"

namespace ballast::tools {
namespace {

using text::Json;

struct InspectArguments {
  std::filesystem::path path;
  checkpoint::CheckpointQuestions questions;
  bool json = false;
  bool swap = false;
  bool remove = false;
};

struct Totals {
  Elems elements = 0;
  Bytes bytes = 0;
  std::map<std::string, Bytes> by_type;
};

/// A tensor as it is stored. For quantised ones the bytes include the scales.
formats::StoredTensor stored_of(const formats::WeightPlace& place) {
  formats::StoredTensor tensor = *place.tensor;
  if (place.quantized == nullptr) return tensor;
  const formats::QuantizedWeights& quantized = *place.quantized;
  using Format = formats::QuantizedWeights::Format;
  tensor.dtype = quantized.format == Format::mxfp4 ? "MXFP4"
                 : quantized.format == Format::nf4 ? "NF4"
                 : quantized.format == Format::fp8 ? "FP8"
                                                   : "INT8";
  tensor.bytes = formats::stored_bytes(place);
  tensor.offset = quantized.codes.tensor->offset;
  return tensor;
}

Totals totals_of(const formats::WeightFiles& weights) {
  Totals totals;
  for (const auto& place : weights.tensors()) {
    const formats::StoredTensor tensor = stored_of(place);
    totals.elements += tensor.elements;
    totals.bytes += tensor.bytes;
    totals.by_type[tensor.dtype] += tensor.bytes;
  }
  return totals;
}

using Shares = std::vector<std::pair<std::string, formats::TensorTotals>>;

/// The tensors of a run that are trained, at least in part, and those that are frozen; none if its
/// config cannot be read.
Shares shares_of_run(const std::filesystem::path& run, const formats::WeightFiles& weights) {
  constexpr std::uint64_t kAnyWorld = 0;
  std::map<const formats::WeightPlace*, bool> is_trained;
  try {
    const config::Config config = config::load(run / train::kConfig, {}, kAnyWorld);
    const model::Architecture model = setup::model_of(config);
    for (const model::BlockSpec& block : model.blocks) {
      for (const model::TensorSpec& tensor : block.tensors) {
        const std::string name =
            model.adapters ? config::kAdapterPrefix + tensor.name : tensor.name;
        const formats::WeightPlace* const place = weights.find(name);
        if (place != nullptr) is_trained[&place->whole()] |= !tensor.frozen;
      }
    }
  } catch (const Error&) {
    return {};
  }
  formats::TensorTotals trained;
  formats::TensorTotals frozen;
  for (const auto& [place, any] : is_trained) (any ? trained : frozen).add(*place);
  return {{"trained", trained}, {"frozen", frozen}};
}

/// The shares of a model in which not everything is trained: trained and frozen tensors, if `run`
/// is a run, and the parts that pass through. Without a run, everything else is the text model.
Shares shares_of(const std::filesystem::path& run, const formats::WeightFiles& weights) {
  std::error_code ignored;
  Shares shares;
  if (std::filesystem::exists(run / train::kRun, ignored)) shares = shares_of_run(run, weights);
  const auto passing = formats::passing_totals(weights);
  if (shares.empty() && !passing.empty()) {
    formats::TensorTotals text;
    for (const auto& place : weights.tensors()) {
      if (!formats::passing_part(weights, place.tensor->name)) text.add(place);
    }
    shares.emplace_back("text model", text);
  }
  for (const auto& [part, totals] : passing) {
    shares.emplace_back(fmt::format("{} (passing through)", to_string(part)), totals);
  }
  const bool all_trained = shares.size() == 2 && shares.back().second.tensors == 0;
  return all_trained ? Shares() : shares;
}

Json shape_of(const formats::StoredTensor& tensor) {
  Json shape = Json::array();
  for (const auto count : tensor.shape) shape.push_back(count);
  return shape;
}

Json weights_json(const formats::WeightFiles& weights, const Totals& totals, const Shares& shares) {
  Json tensors = Json::array();
  for (const auto& place : weights.tensors()) {
    const formats::StoredTensor tensor = stored_of(place);
    tensors.push_back(Json::object({{"name", tensor.name},
                                    {"dtype", tensor.dtype},
                                    {"shape", shape_of(tensor)},
                                    {"bytes", tensor.bytes},
                                    {"file", place.file->path().filename().string()},
                                    {"offset", tensor.offset}}));
  }
  Json list = Json::array();
  for (const auto& [name, share] : shares) {
    list.push_back(Json::object({{"share", name},
                                 {"tensors", share.tensors},
                                 {"elements", share.elements},
                                 {"bytes", share.bytes}}));
  }
  return Json::object({{"path", weights.path().string()},
                       {"files", weights.files().size()},
                       {"elements", totals.elements},
                       {"bytes", totals.bytes},
                       {"shares", list},
                       {"tensors", tensors}});
}

void print_json(const Json& out) {
  constexpr unsigned kLevels = 2;  // one line per tensor
  fmt::print("{}\n", out.pretty(kLevels));
}

void print_table(const formats::WeightFiles& weights, const Totals& totals, const Shares& shares) {
  const formats::SafetensorsReader* last = nullptr;
  std::size_t width = 0;
  for (const auto& place : weights.tensors()) {
    width = std::max(width, text::printable(place.tensor->name).size());
  }
  for (const auto& place : weights.tensors()) {
    if (place.file != last) fmt::print("{}\n", place.file->path().string());
    last = place.file;
    const formats::StoredTensor tensor = stored_of(place);
    fmt::print("  {:<{}}  {:<5} {:>10}  {}\n", text::printable(tensor.name), width, tensor.dtype,
               format_bytes(tensor.bytes), shape_of(tensor).compact());
  }
  std::string types;
  for (const auto& [type, bytes] : totals.by_type) {
    types += fmt::format("{}{} {}", types.empty() ? "" : ", ", type, format_bytes(bytes));
  }
  const std::size_t files = weights.files().size();
  fmt::print("{} tensors in {} file{}, {} elements, {}{}\n", weights.tensors().size(), files,
             files == 1 ? "" : "s", format_count(static_cast<double>(totals.elements)),
             format_bytes(totals.bytes), types.empty() ? "" : " (" + types + ")");
  for (const auto& [name, share] : shares) {
    fmt::print("  {}: {} tensors, {} elements, {}\n", name, share.tensors,
               format_count(static_cast<double>(share.elements)), format_bytes(share.bytes));
  }
}

void inspect_checkpoint(const InspectArguments& arguments) {
  const auto reports = examine({arguments.path}, arguments.questions);
  if (arguments.json) {
    print_json(report_json(reports.front(), arguments.questions));
  } else {
    print_checkpoint(reports.front(), arguments.questions);
  }
  refuse_damage(arguments.path, reports);
}

/// The weights of a run that also has checkpoints, if there are any.
std::optional<formats::WeightFiles> weights_beside_checkpoints(const std::filesystem::path& run) {
  std::filesystem::path found;
  try {
    found = formats::weights_at(run);
  } catch (const Error&) {
    return std::nullopt;
  }
  std::optional<formats::WeightFiles> weights;
  if (found != run) weights.emplace(found);
  return weights;
}

void inspect_run(const InspectArguments& arguments,
                 const std::vector<std::filesystem::path>& checkpoints) {
  const auto weights = weights_beside_checkpoints(arguments.path);
  const Shares shares = weights ? shares_of(arguments.path, *weights) : Shares();
  if (weights && !arguments.json) print_table(*weights, totals_of(*weights), shares);
  const auto reports = examine(checkpoints, arguments.questions);
  if (arguments.json) {
    Json out = weights ? weights_json(*weights, totals_of(*weights), shares)
                       : Json::object({{"path", arguments.path.string()}});
    Json list = Json::array();
    for (const auto& report : reports) list.push_back(report_json(report, arguments.questions));
    out["checkpoints"] = list;
    out["resume"] = resumed_one(reports);
    print_json(out);
  } else {
    fmt::print("{} in {}\n", reports.size() == 1 ? "checkpoint" : "checkpoints",
               arguments.path.string());
    print_checkpoints(reports, arguments.questions);
  }
  refuse_damage(arguments.path, reports);
}

void run_inspect(const InspectArguments& arguments) {
  if (arguments.swap) return inspect_swap(arguments.path, arguments.remove, arguments.json);
  if (arguments.remove) {
    throw Error(ErrorCategory::usage, "--remove removes swap files; give it with --swap");
  }
  if (checkpoint::names_checkpoint(arguments.path)) return inspect_checkpoint(arguments);
  const auto checkpoints = checkpoint::checkpoints_of(arguments.path);
  if (!checkpoints.empty()) return inspect_run(arguments, checkpoints);
  if (arguments.questions.whole || arguments.questions.hash) {
    throw Error(ErrorCategory::usage,
                fmt::format("{} has no checkpoints to {}", arguments.path.string(),
                            arguments.questions.whole ? "--verify" : "--hash"));
  }
  const formats::WeightFiles weights(formats::weights_at(arguments.path));
  const Totals totals = totals_of(weights);
  const Shares shares = shares_of(arguments.path, weights);
  if (arguments.json) {
    print_json(weights_json(weights, totals, shares));
  } else {
    print_table(weights, totals, shares);
  }
}

}  // namespace

void add_inspect(Command program) {
  auto arguments = std::make_shared<InspectArguments>();
  Command command = program.add_command(
      "inspect", "List the tensors of a model, the content of checkpoints, or swap files");
  command.add_option(
      "PATH", &arguments->path,
      "Run directory, checkpoint, Hugging Face folder, index or safetensors file; with --swap a "
      "folder of swap files",
      {.required = true, .takes = Names::model, .extensions = {".safetensors", ".json"}});
  command.add_flag("--verify", &arguments->questions.whole,
                   "Read all of each checkpoint and compare it with its checksums");
  command.add_flag("--hash", &arguments->questions.hash,
                   "Print an XXH3 of all weights and states of a checkpoint: the same for every "
                   "number of ranks that can write it");
  command.add_flag("--json", &arguments->json, "Print a JSON object");
  command.add_flag("--swap", &arguments->swap,
                   "List the swap files of checkpoints in a folder (an nvme_path), and the runs to "
                   "which they belong");
  command.add_flag("--remove", &arguments->remove,
                   "With --swap: remove the files that no run owns and no process uses");
  command.set_action([arguments] { run_inspect(*arguments); });
}

}  // namespace ballast::tools
