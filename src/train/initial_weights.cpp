#include "src/train/initial_weights.h"

#include <algorithm>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <unordered_set>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/suggest.h"
#include "ballast/model/family.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

#include "src/train/safetensors_header.h"

namespace ballast::train {
namespace {

namespace fs = std::filesystem;
using text::Json;

constexpr std::string_view kKey = "model.weights";

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCategory::data, message);
}

/// Refuses folders and indexes, which Hugging Face's own loader accepts.
void check_kind(const fs::path& path) {
  constexpr std::string_view kIndex = "model.safetensors.index.json";
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) {
    if (!path.native().ends_with(".index.json") || !fs::exists(path, ignored)) return;
    refuse(
        fmt::format("{} is the index of a sharded checkpoint, and sharded checkpoints are not "
                    "supported yet; give a single .safetensors file",
                    path.string()));
  }
  if (const fs::path single = path / "model.safetensors"; fs::exists(single, ignored)) {
    refuse(fmt::format("{} is a folder of a checkpoint; give its file {}", path.string(),
                       single.string()));
  }
  const bool sharded = fs::exists(path / kIndex, ignored);
  refuse(
      fmt::format("{} is a folder{}; give a single .safetensors file (sharded checkpoints are not "
                  "supported yet)",
                  path.string(), sharded ? " of a sharded checkpoint" : ""));
}

SafetensorsReader open_weights(const fs::path& path) {
  try {
    return SafetensorsReader(path);
  } catch (const Error& error) {
    if (error.error_number() == 0) throw;
    throw Error(error.category(), fmt::format("cannot read {}", path.string()),
                error.error_number());
  }
}

void check_shape(const SafetensorsReader& file, const model::TensorSpec& tensor) {
  const StoredTensor* stored = file.find(tensor.name);
  if (stored == nullptr || stored->shape == tensor.shape) return;
  refuse(fmt::format("{}: tensor '{}' has shape {}, but the model needs {}", file.path().string(),
                     tensor.name, format_shape(stored->shape), format_shape(tensor.shape)));
}

void check_tensor(const SafetensorsReader& file, const model::Architecture& model,
                  const model::TensorSpec& tensor) {
  const fs::path& path = file.path();
  // Hugging Face names the files of a sharded checkpoint model-00001-of-00002.safetensors.
  const bool shard = path.filename().string().find("-of-") != std::string::npos;
  if (shard && file.find(tensor.name) == nullptr) {
    refuse(
        fmt::format("{} is one file of a sharded checkpoint and has no tensor '{}'; give a single "
                    ".safetensors file (sharded checkpoints are not supported yet)",
                    path.string(), tensor.name));
  }
  if (tensor.name == model.outer.output && file.find(tensor.name) == nullptr) {
    refuse(
        fmt::format("{} has no tensor '{}', so its embeddings are tied; set "
                    "model.tie_embeddings to true",
                    path.string(), tensor.name));
  }
  file.read(tensor.name, {});  // throws for a missing tensor and for a wrong dtype
  check_shape(file, tensor);
}

/// Compares values, since the two may have different dtypes. Reads both in pieces.
bool are_equal(const SafetensorsReader& file, const StoredTensor& one, const StoredTensor& other) {
  constexpr Elems kPiece = Elems{1} << 20;
  if (one.shape != other.shape) return false;
  std::vector<float> left;
  std::vector<float> right;
  for (Elems done = 0; done < one.elements; done += left.size()) {
    left.resize(std::min(kPiece, one.elements - done));
    right.resize(left.size());
    file.read(one.name, left, done);
    file.read(other.name, right, done);
    if (left != right) return false;
  }
  return true;
}

/// A tied model has no output matrix; a file may hold it as a copy of the embedding.
void check_tied(const SafetensorsReader& file, const model::Architecture& model) {
  const StoredTensor* output = file.find(model.outer.output);
  if (!model.config.tie_embeddings || output == nullptr) return;
  if (are_equal(file, *output, *file.find(model.outer.tokens))) return;
  refuse(
      fmt::format("{}: '{}' differs from '{}', so the file's embeddings are not tied; set "
                  "model.tie_embeddings to false",
                  file.path().string(), model.outer.output, model.outer.tokens));
}

/// Refuses tensors that the model does not use: without them the file is another model.
void check_unused(const SafetensorsReader& file, const model::Architecture& model) {
  constexpr std::size_t kNamed = 3;
  std::unordered_set<std::string_view> used = {model.outer.output};  // see check_tied()
  for (const model::BlockSpec& block : model.blocks) {
    for (const model::TensorSpec& tensor : block.tensors) used.insert(tensor.name);
  }
  const auto buffers = model::family(model.config.family).checkpoint_buffers(model.config);
  std::string names;
  std::size_t unused = 0;
  for (const StoredTensor& tensor : file.tensors()) {
    const bool buffer = std::any_of(buffers.begin(), buffers.end(), [&](const auto& known) {
      return tensor.name.ends_with(known.suffix) && tensor.shape == known.shape;
    });
    if (buffer || used.contains(tensor.name)) continue;
    if (++unused <= kNamed) names += (names.empty() ? "" : ", ") + text::printable(tensor.name);
  }
  if (unused == 0) return;
  refuse(fmt::format(
      "{} has {} tensor{} that this model does not use ({}{}); change the keys of "
      "model to those of the file, or give the weights of this model",
      file.path().string(), unused, unused == 1 ? "" : "s", names, unused > kNamed ? ", ..." : ""));
}

/// The value of a CheckpointKey's name; nullptr if it is missing or null.
const Json* find_given(const Json& object, std::string_view name) {
  const std::size_t dot = name.find('.');
  const Json* const found = object.find(name.substr(0, dot));
  if (found == nullptr || found->is_null()) return nullptr;
  return dot == std::string_view::npos ? found : find_given(*found, name.substr(dot + 1));
}

bool are_equal(const Json& one, const Json& other) {
  if (one.is_number() && other.is_number()) return one.number() == other.number();
  return one.compact() == other.compact();
}

std::string shown(const Json& value) {
  constexpr std::size_t kLongest = 60;
  return text::printable(value.compact(), kLongest);
}

bool holds(const std::vector<std::string>& values, const Json& value) {
  return std::find(values.begin(), values.end(), value.text()) != values.end();
}

[[noreturn]] void refuse_unsupported(const std::string& file, const model::CheckpointKey& key,
                                     const Json& theirs,
                                     const std::vector<std::string>& supported) {
  throw Error(
      ErrorCategory::config,
      fmt::format("{}: {} is {}, but Ballast supports only {}; give the weights of another "
                  "model",
                  file, key.name, shown(theirs), supported.empty() ? "null" : listed(supported)));
}

/// Compares the model section with the config.json beside the weights. Shapes alone do not say, for
/// example, how many heads a matrix holds.
void compare_configs(const fs::path& path, const config::Config& config) {
  const auto keys = model::family(config.model.family).checkpoint_keys();
  std::error_code ignored;
  if (keys.empty() || !fs::exists(path, ignored)) return;
  // It may be a config of Ballast, which has comments and none of these keys.
  const Json file =
      text::parse_json(text::read_settings(path, "config"), path.string(), {.comments = true});
  const Json effective = text::parse_json(config::print(config), "the config");
  for (const model::CheckpointKey& key : keys) {
    const Json* const theirs = find_given(file, key.name);
    if (theirs == nullptr) continue;
    if (key.own.empty()) {
      if (!holds(key.supported, *theirs)) {
        refuse_unsupported(path.string(), key, *theirs, key.supported);
      }
      continue;
    }
    const Json* const ours = find_given(effective, "model." + key.own);
    expects(ours != nullptr, "checkpoint_keys() names a key that the model section lacks");
    if (are_equal(*theirs, *ours)) continue;
    const auto families = model::family_names();
    if (key.own == "family" && !holds(families, *theirs)) {
      refuse_unsupported(path.string(), key, *theirs, families);
    }
    throw Error(ErrorCategory::config,
                fmt::format("{}: {} is {}, but model.{} is {}; set model.{} to {}, or give other "
                            "weights",
                            path.string(), key.name, shown(*theirs), key.own, shown(*ours), key.own,
                            shown(*theirs)));
  }
}

void check(const config::Config& config) {
  check_kind(config.initial_weights);
  const SafetensorsReader file = open_weights(config.initial_weights);
  compare_configs(file.path().parent_path() / "config.json", config);
  const model::Architecture model = model::build_architecture(config.model);
  for (const model::BlockSpec& block : model.blocks) {
    for (const model::TensorSpec& tensor : block.tensors) check_tensor(file, model, tensor);
  }
  check_unused(file, model);
  check_tied(file, model);
}

}  // namespace

void check_initial_weights(const config::Config& config) {
  if (config.initial_weights.empty()) return;
  try {
    check(config);
  } catch (const Error& error) {
    throw error.with_context(kKey);
  }
}

void read_initial_weights(const SafetensorsReader& file, const model::TensorSpec& tensor,
                          Elems first, std::span<float> out) {
  check_shape(file, tensor);
  file.read(tensor.name, out, first);
}

}  // namespace ballast::train
