#include <cmath>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <unistd.h>

#include "ballast/config/config.h"
#include "ballast/core/error.h"
#include "ballast/core/units.h"
#include "ballast/text/json.h"
#include "ballast/train/trainer.h"

#include "tools/command_line.h"
#include "tools/commands/requests.h"
#include "tools/console/terminal.h"
#include "tools/signals.h"

namespace ballast::tools {
namespace {

struct EvalArguments {
  train::EvaluationRequest request;
  bool json = false;
};

std::string to_json(const train::ModelEvaluation& found, const config::DataSection& data) {
  text::Json json = text::Json::object();
  json["loss"] = found.loss;
  if (data.pairs.empty()) json["perplexity"] = std::exp(found.loss);
  json[data.pairs.empty() ? "targets" : "pairs"] = found.targets;
  json["sequences"] = found.sequences;
  json["sequence_length"] = data.sequence_length;
  json["seconds"] = found.seconds;
  for (const Tier tier : kTiers) {
    json["bytes"][to_string(tier)] = found.allocated.at(static_cast<std::size_t>(tier));
  }
  return json.pretty();
}

void show(const Terminal& terminal, const train::ModelEvaluation& found,
          const config::DataSection& data) {
  terminal.show(fmt::format("{:<17} {}", "device", found.device));
  for (const std::string& line : found.placement) terminal.show(line);
  const bool pairs = !data.pairs.empty();
  terminal.show(fmt::format("{:<17} {} sequence{} of {} tokens, {} {}, {:.1f} s", "data",
                            found.sequences, found.sequences == 1 ? "" : "s", data.sequence_length,
                            found.targets, pairs ? "pairs" : "targets", found.seconds));
  terminal.show(
      fmt::format("{:<17} {:.6f} {}", "loss", found.loss, pairs ? "per pair" : "nats per target"));
  if (pairs) return;
  terminal.show(fmt::format("{:<17} {:.6g}", "perplexity", std::exp(found.loss)));
}

config::Config read_request(const train::EvaluationRequest& request) {
  try {
    return train::read_evaluation(request);
  } catch (const Error& error) {
    refuse_other_kind(request.path, formats::Settings::config, error);
    throw;
  }
}

void run_eval(const EvalArguments& arguments) {
  announce_ending("the evaluation ends without a result");
  config::Config config = read_request(arguments.request);
  for (const auto& line : config.ignored) log(LogLevel::debug, "ignored: " + line);
  for (const auto& line : config.notes) log(LogLevel::debug, line);
  // Needed only for weights on NVMe without a path. The run's own directory belongs to its
  // training.
  config.ballast.out = default_run_directory(arguments.request.path);
  const Terminal terminal(!arguments.json && isatty(STDOUT_FILENO) == 1);
  const auto progress = [&](std::string_view what, std::uint64_t done, std::uint64_t total) {
    const double share = static_cast<double>(done) / static_cast<double>(total);
    terminal.live(fmt::format("{}, {:.0f}%", what, 100.0 * share));
  };
  const auto found = train::evaluate_model(config, progress, &interrupted());
  if (arguments.json) {
    fmt::print("{}\n", to_json(found, config.data));
  } else {
    terminal.show(fmt::format("ballast eval {}", arguments.request.path.string()));
    show(terminal, found, config.data);
  }
}

}  // namespace

void add_eval(Command program) {
  auto arguments = std::make_shared<EvalArguments>();
  auto& a = *arguments;
  Command command = program.add_command("eval", "Compute the loss of a model on data");
  command.add_option("PATH", &a.request.path,
                     "JSON config, run directory, or Hugging Face folder (in bf16; fp32 with "
                     "--set bf16.enabled=false)",
                     {.required = true, .takes = Names::model, .extensions = {".json"}});
  command.add_option(
      "--data", &a.request.data,
      "Files to evaluate on: documents (.safetensors), tokens (.bin, .npy) or text "
      "(default: data.eval or the held-out part; a folder has none)",
      {.takes = Names::path, .extensions = {".safetensors", ".bin", ".npy", ".txt"}});
  command.add_option("--sequence-length", &a.request.sequence_length,
                     "Tokens per sequence (default: the config's; for a folder the model's "
                     "longest, at most 4096); tokens and text count in whole sequences only",
                     {.positive = true});
  command.add_option("--set", &a.request.overrides, "Override a key: path.to.key=value",
                     {.single_argument = true, .takes = Names::setting});
  command.add_flag("--json", &a.json, "Print a JSON object");
  command.set_action([arguments] { run_eval(*arguments); });
}

}  // namespace ballast::tools
