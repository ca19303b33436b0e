#include <chrono>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "ballast/config/config.h"
#include "ballast/core/error.h"
#include "ballast/core/log.h"
#include "ballast/train/trainer.h"

#include "tools/commands.h"
#include "tools/console.h"

namespace ballast::tools {
namespace {

struct TrainArguments {
  std::filesystem::path config;
  std::vector<std::string> overrides;
  std::filesystem::path out;
  std::uint64_t steps = 0;
  train::TraceRequest trace;
  bool serial = false;
  bool print_config = false;
};

/// $XDG_STATE_HOME/ballast, or its usual place, or one for users without a home.
std::filesystem::path state_home() {
  if (const char* state = std::getenv("XDG_STATE_HOME"); state != nullptr && *state == '/') {
    return std::filesystem::path(state) / "ballast";
  }
  if (const char* home = std::getenv("HOME"); home != nullptr && *home == '/') {
    return std::filesystem::path(home) / ".local/state/ballast";
  }
  return "/var/tmp/ballast";
}

/// A run directory named after the config and the time.
std::filesystem::path default_run_directory(const std::filesystem::path& config) {
  const std::time_t now = std::time(nullptr);
  std::tm local = {};
  localtime_r(&now, &local);
  std::array<char, 32> stamp{};
  std::strftime(stamp.data(), stamp.size(), "%Y%m%d-%H%M%S", &local);
  const auto base = state_home() / fmt::format("{}-{}", config.stem().string(), stamp.data());
  auto directory = base;
  for (int i = 2; std::filesystem::exists(directory); ++i) {
    directory = fmt::format("{}-{}", base.string(), i);
  }
  return directory;
}

config::Config load_config(const TrainArguments& arguments) {
  config::Config config = config::load(arguments.config, arguments.overrides);
  if (arguments.steps > 0) config.ballast.steps = arguments.steps;
  if (arguments.serial) config.ballast.serial = true;
  if (!arguments.out.empty()) config.ballast.out = std::filesystem::absolute(arguments.out);
  if (config.ballast.out.empty()) config.ballast.out = default_run_directory(arguments.config);
  return config;
}

void run_train(const TrainArguments& arguments) {
  const config::Config config = load_config(arguments);
  if (arguments.print_config) {
    fmt::print("{}\n", config::print(config));
    return;
  }
  if (config.ballast.steps == 0) {
    throw Error(
        ErrorCategory::usage,
        arguments.config.string() + ": ballast.steps: how many steps? Set it, or give --steps N");
  }
  for (const auto& line : config.ignored) log(LogLevel::info, "ignored: " + line);
  Console console(fmt::format("ballast train {}", arguments.config.string()),
                  config.steps_per_print);
  train::train(config, console, &interrupted(), arguments.trace);
  fmt::print("metrics in {}\n", (config.ballast.out / "metrics.jsonl").string());
  if (!arguments.trace.file.empty()) fmt::print("trace in {}\n", arguments.trace.file.string());
}

}  // namespace

void add_train(CLI::App& app, Action& action) {
  auto arguments = std::make_shared<TrainArguments>();
  CLI::App* command = app.add_subcommand("train", "Train what CONFIG describes");
  command->add_option("CONFIG", arguments->config, "JSON config (see configs/README.md)")
      ->required();
  command->add_option("--set", arguments->overrides, "Override a key: path.to.key=value")
      ->allow_extra_args(false);
  command->add_option("--steps", arguments->steps, "Steps to train, in place of ballast.steps")
      ->check(CLI::PositiveNumber);
  command->add_option("--out", arguments->out, "Run directory");
  CLI::Option* trace = command->add_option(
      "--trace", arguments->trace.file, "Write a timeline of the first steps, for ui.perfetto.dev");
  command->add_option("--trace-steps", arguments->trace.steps, "Steps to trace")
      ->capture_default_str()
      ->check(CLI::PositiveNumber)
      ->needs(trace);
  command->add_flag("--serial", arguments->serial,
                    "One operation at a time; same results, for debugging");
  command->add_flag("--print-config", arguments->print_config,
                    "Print the effective config and stop");
  command->callback([&action, arguments] { action = [arguments] { run_train(*arguments); }; });
}

}  // namespace ballast::tools
