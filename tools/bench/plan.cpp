#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "ballast/calibrate/calibrate.h"
#include "ballast/config/config.h"
#include "ballast/core/clocks.h"
#include "ballast/core/error.h"
#include "ballast/engine/engine.h"
#include "ballast/memory/machine.h"
#include "ballast/plan/lane_times.h"
#include "ballast/plan/simulator.h"
#include "ballast/setup/forecast.h"
#include "ballast/setup/setup.h"
#include "ballast/setup/translate.h"
#include "ballast/text/json.h"

#include "tools/bench/bench.h"
#include "tools/command_line.h"
#include "tools/signals.h"

namespace ballast::tools {

/// A way to run the model of `bench plan`.
struct PlanCase {
  std::string_view name;
  std::string_view what;  ///< description for --list
  /// Config overrides separated by spaces: "link_gbps=2 order=micro_batch_major".
  std::string_view settings;
};

/// Cases with different bottlenecks.
const std::vector<PlanCase>& plan_cases();

/// Ways to run the model with a batch of 8 sequences, chosen by hand, and the same case decided by
/// the planner.
const std::vector<PlanCase>& hand_made_cases();
const PlanCase& planners_case();

/// The config of a case: six layers of GPT-2's width, swapping to `directory`, with the case's
/// settings and then `overrides`. Throws Error(config).
config::Config make_plan_config(const PlanCase& plan_case, const std::filesystem::path& directory,
                                const std::vector<std::string>& overrides);

namespace {

constexpr std::string_view kModel = R"({{
  "model": {{"family": "gpt2", "vocab_size": 8192, "hidden_size": 768, "num_layers": 6,
             "num_heads": 12, "max_sequence": 512}},
  "data": {{"tokens": ["none"], "token_type": "u32", "sequence_length": 256}},
  "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-4}}}},
  "bf16": {{"enabled": true}},
  "zero_optimization": {{"offload_optimizer": {{"nvme_path": "{0}"}},
                         "offload_param": {{"nvme_path": "{0}"}}}},
  "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
  "ballast": {{"device": "host", "out": "{0}"}}}})";

constexpr std::string_view kOptimizer = "zero_optimization.offload_optimizer.device=";
constexpr std::string_view kWeights = "zero_optimization.offload_param.device=";
constexpr std::string_view kMicro = "train_micro_batch_size_per_gpu=";
constexpr std::string_view kAccumulation = "gradient_accumulation_steps=";

/// Expands the abbreviated keys of the cases.
std::string expand(const std::string& word) {
  const auto value = word.find('=') + 1;
  const std::string key = word.substr(0, value);
  const std::string rest = word.substr(value);
  if (key == "optimizer=") return std::string(kOptimizer) + rest;
  if (key == "weights=") return std::string(kWeights) + rest;
  if (key == "micro=") return std::string(kMicro) + rest;
  if (key == "accumulation=") return std::string(kAccumulation) + rest;
  if (key == "batch=") return "train_batch_size=" + rest;
  if (key == "staging=") return "zero_optimization.offload_optimizer.buffer_count=" + rest;
  if (key == "length=") return "data.sequence_length=" + rest;
  return "ballast." + word;
}

}  // namespace

const std::vector<PlanCase>& plan_cases() {
  static const std::vector<PlanCase> cases = {
      {"compute", "all on the device, large micro-batches", "micro=8 accumulation=2 length=512"},
      {"small", "all on the device, small micro-batches", "micro=1 accumulation=8 length=128"},
      {"memory", "all on the device, very few tokens", "micro=1 accumulation=1 length=8"},
      {"link", "a slow link, weights and optimizer on the host, few tokens",
       "weights=cpu optimizer=cpu link_gbps=0.5 micro=1 accumulation=1 length=128"},
      {"hidden-link", "a slow link, many tokens",
       "weights=cpu optimizer=cpu link_gbps=2 micro=4 accumulation=2"},
      {"update", "8-bit states on the host, one update thread without vectors",
       "weights=cpu optimizer=cpu optimizer_states=8bit update_threads=1 update_isa=scalar micro=1 "
       "accumulation=1 length=64"},
      {"nvme-optimizer", "optimizer on NVMe, few tokens",
       "weights=cpu optimizer=nvme micro=1 accumulation=1 length=128"},
      {"nvme-all", "weights and optimizer on NVMe, few tokens",
       "weights=nvme optimizer=nvme micro=1 accumulation=2 length=128"},
      {"nvme-hidden", "weights and optimizer on NVMe, many tokens",
       "weights=nvme optimizer=nvme micro=8 accumulation=2"},
      {"micro-major", "weights on NVMe, each micro-batch through all blocks",
       "weights=nvme optimizer=cpu order=micro_batch_major micro=1 accumulation=8 length=64"},
      {"activations-host", "activations on the host over a slow link",
       "activations=host optimizer=cpu link_gbps=0.25 micro=4 accumulation=4 length=128"},
      {"activations-nvme", "activations and optimizer on NVMe",
       "activations=nvme optimizer=nvme micro=8 accumulation=4 length=128"},
      {"eager", "optimizer on NVMe, updates inside the backward pass",
       "optimizer=nvme update=eager micro=4 accumulation=1"},
  };
  return cases;
}

const PlanCase& planners_case() {
  static const PlanCase planner = {
      "planner", "the planner's choice",
      "weights=auto optimizer=auto activations=auto micro=auto accumulation=auto batch=8"};
  return planner;
}

const std::vector<PlanCase>& hand_made_cases() {
  static const std::vector<PlanCase> cases = {
      {"nvme-1", "all on NVMe, micro-batches of 1",
       "weights=nvme optimizer=nvme micro=1 accumulation=8"},
      {"nvme-2", "all on NVMe, micro-batches of 2",
       "weights=nvme optimizer=nvme micro=2 accumulation=4"},
      {"nvme-4", "all on NVMe, micro-batches of 4",
       "weights=nvme optimizer=nvme micro=4 accumulation=2"},
      {"nvme-8", "all on NVMe, micro-batches of 8",
       "weights=nvme optimizer=nvme micro=8 accumulation=1"},
      {"states-1", "only the optimizer on NVMe, micro-batches of 1",
       "weights=cpu optimizer=nvme micro=1 accumulation=8"},
      {"states-2", "only the optimizer on NVMe, micro-batches of 2",
       "weights=cpu optimizer=nvme micro=2 accumulation=4"},
      {"states-4", "only the optimizer on NVMe, micro-batches of 4",
       "weights=cpu optimizer=nvme micro=4 accumulation=2"},
      {"states-8", "only the optimizer on NVMe, micro-batches of 8",
       "weights=cpu optimizer=nvme micro=8 accumulation=1"},
      {"resident-2", "weights on the device", "optimizer=nvme micro=2 accumulation=4"},
      {"resident-8", "weights on the device, one micro-batch",
       "optimizer=nvme micro=8 accumulation=1"},
      {"resident-host", "weights on the device, activations on the host",
       "optimizer=nvme activations=host micro=8 accumulation=1"},
      {"resident-nvme", "weights on the device, activations on NVMe",
       "optimizer=nvme activations=nvme micro=8 accumulation=1"},
      {"weights-nvme", "weights on NVMe, optimizer placed by the planner",
       "weights=nvme optimizer=auto micro=8 accumulation=1"},
      {"filled-host", "weights on the host, optimizer placed by the planner",
       "weights=cpu optimizer=auto micro=8 accumulation=1"},
      {"filled-device", "weights on the device, optimizer placed by the planner",
       "optimizer=auto micro=8 accumulation=1"},
      {"filled-2", "filled-device with micro-batches of 2",
       "optimizer=auto micro=2 accumulation=4"},
      {"deep", "filled-device with 4 staging buffers for states",
       "optimizer=auto staging=4 micro=8 accumulation=1"},
      {"shallow", "optimizer on NVMe, 2 staging buffers for states",
       "optimizer=nvme staging=2 micro=8 accumulation=1"},
      {"first", "optimizer of the first block on the host",
       R"(weights=cpu optimizer=nvme staging=2 placement=[{"blocks":"0","optimizer":"host"}] )"
       "micro=8 accumulation=1"},
      {"last", "optimizer of the last layer on the host",
       R"(weights=cpu optimizer=nvme staging=2 placement=[{"blocks":"6-7","optimizer":"host"}] )"
       "micro=8 accumulation=1"},
      {"micro-major", "each micro-batch through all blocks",
       "weights=cpu optimizer=nvme order=micro_batch_major micro=4 accumulation=2"},
  };
  return cases;
}

config::Config make_plan_config(const PlanCase& plan_case, const std::filesystem::path& directory,
                                const std::vector<std::string>& overrides) {
  std::vector<std::string> all;
  std::istringstream words{std::string(plan_case.settings)};
  for (std::string word; words >> word;) {
    // Updates that do not wait for the norm need clipping to be off.
    if (word == "update=eager") all.emplace_back("gradient_clipping=0");
    all.push_back(expand(word));
  }
  all.insert(all.end(), overrides.begin(), overrides.end());
  return config::parse(fmt::format(kModel, directory.string()), directory, "bench plan", all);
}

namespace {

using Lanes = std::array<double, plan::kLaneCount>;

struct BenchPlanArguments {
  std::vector<std::string> only;
  std::vector<std::string> overrides;
  std::filesystem::path path = ".";
  std::uint64_t steps = 3;
  /// Number of rounds. Each calibrates, then trains steps: the speed of a shared machine changes
  /// from one minute to the next, and a prediction can be no better than its rates.
  std::uint64_t rounds = 3;
  bool choice = false;
  bool list = false;
  bool json = false;
};

struct Outcome {
  plan::Prediction predicted;  ///< prediction of the last round
  calibrate::Calibration calibration;
  std::uint64_t tokens = 0;
  std::vector<double> predicted_seconds;  ///< predicted step per round
  std::vector<double> measured_seconds;   ///< median step per round
  Lanes busy{};                           ///< per step of the last round
  Bytes planned = 0;                      ///< memory of both tiers
  Bytes allocated = 0;
  Bytes resident = 0;  ///< peak growth of the process

  [[nodiscard]] double predicted_step() const { return quantile(predicted_seconds, 0.5); }
  [[nodiscard]] double measured_step() const { return quantile(measured_seconds, 0.5); }
  /// Median over the rounds.
  [[nodiscard]] double error() const {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < measured_seconds.size(); ++i) {
      ratios.push_back(predicted_seconds[i] / measured_seconds[i]);
    }
    return quantile(ratios, 0.5) - 1.0;
  }
  [[nodiscard]] double memory_error() const {
    return static_cast<double>(planned) / static_cast<double>(resident) - 1.0;
  }
};

/// Resets the process's peak and returns its resident bytes. If the kernel does not support that,
/// returns the peak since its start.
Bytes reset_peak_resident() {
  std::ofstream("/proc/self/clear_refs") << "5";
  return memory::peak_resident_bytes();
}

/// Trains `config`, with a calibration before each round of steps.
Outcome train(const config::Config& config, const BenchPlanArguments& arguments) {
  Outcome outcome;
  const engine::RunInputs run = setup::translate(config);
  outcome.calibration = calibrate::calibrate(run);
  const Bytes before = reset_peak_resident();
  engine::Engine engine = setup::make_engine(config, &interrupted());
  const engine::Blueprint& blueprint = engine.blueprint();
  outcome.planned = blueprint.ledger.total(Tier::device) + blueprint.ledger.total(Tier::host);
  outcome.tokens = blueprint.tokens_per_step();
  engine.start();
  const auto inputs = random_ids(outcome.tokens, config.model.vocab_size, 1);
  const auto targets = random_ids(outcome.tokens, config.model.vocab_size, 2);
  const auto step = [&] { return seconds_of([&] { engine.train_step({inputs, targets}, 1e-4); }); };
  constexpr int kWarmUp = 2;
  for (std::uint64_t round = 0; round < arguments.rounds; ++round) {
    if (round > 0) {
      engine.finish();
      outcome.calibration = calibrate::calibrate(run);
    }
    outcome.predicted = plan::simulate(blueprint.schedule, outcome.calibration.rates);
    outcome.predicted_seconds.push_back(outcome.predicted.step_seconds);
    for (int i = 0; i < kWarmUp; ++i) step();
    const auto totals = engine.totals();
    std::vector<double> seconds;
    for (std::uint64_t i = 0; i < arguments.steps; ++i) seconds.push_back(step());
    const auto after = engine.totals();
    for (std::size_t lane = 0; lane < plan::kLaneCount; ++lane) {
      outcome.busy[lane] = (after.lanes.busy_seconds[lane] - totals.lanes.busy_seconds[lane]) /
                           static_cast<double>(arguments.steps);
    }
    outcome.measured_seconds.push_back(quantile(seconds, 0.5));
    if (round == 0) outcome.resident = memory::peak_resident_bytes() - before;
  }
  const auto allocated = engine.totals().allocated;
  outcome.allocated = allocated[static_cast<std::size_t>(Tier::device)] +
                      allocated[static_cast<std::size_t>(Tier::host)];
  engine.finish();
  return outcome;
}

/// Returns `config` with every "auto" decided by the planner for this machine's rates.
config::Config decide(const config::Config& config) {
  planner::PlanRequest request = setup::plan_request(config);
  request.rates = calibrate::calibrate(request.run).rates;
  request.budgets = setup::budgets_of(config, request.rates, 1);
  return setup::settle(config, planner::decide(request).blueprint);
}

std::string_view bound_of(const Outcome& outcome) {
  return to_string(
      plan::find_bottleneck(outcome.predicted.busy_seconds, outcome.predicted_step()).lane);
}

void print_head() {
  fmt::print("{:<17}{:>7}{:>11}{:>11}{:>8}  {:<10}{:>10}{:>10}{:>8}\n", "case", "tokens",
             "predicted", "measured", "error", "bound", "ledger", "resident", "error");
}

void print_row(const PlanCase& plan_case, const Outcome& outcome) {
  fmt::print("{:<17}{:>7}{:>9.1f}ms{:>9.1f}ms{:>+7.1f}%  {:<10}{:>10}{:>10}{:>+7.1f}%\n",
             plan_case.name, outcome.tokens, 1e3 * outcome.predicted_step(),
             1e3 * outcome.measured_step(), 100.0 * outcome.error(), bound_of(outcome),
             format_bytes(outcome.planned), format_bytes(outcome.resident),
             100.0 * outcome.memory_error());
  if (!outcome.calibration.disturbance.empty()) {
    fmt::print("  disturbed while it was measured: {}\n", outcome.calibration.disturbance);
  }
  std::fflush(stdout);
}

text::Json json_of(const PlanCase& plan_case, const Outcome& outcome) {
  text::Json lanes;
  for (const plan::Lane lane : plan::kLanes) {
    const auto index = static_cast<std::size_t>(lane);
    lanes[to_string(lane)] =
        text::Json::object({{"predicted_busy_seconds", outcome.predicted.busy_seconds[index]},
                            {"busy_seconds", outcome.busy[index]}});
  }
  return text::Json::object({{"case", plan_case.name},
                             {"tokens", outcome.tokens},
                             {"predicted_step_seconds", outcome.predicted_step()},
                             {"step_seconds", outcome.measured_step()},
                             {"error_percent", 100.0 * outcome.error()},
                             {"bottleneck", bound_of(outcome)},
                             {"ledger_bytes", outcome.planned},
                             {"allocated_bytes", outcome.allocated},
                             {"resident_bytes", outcome.resident},
                             {"disturbance", outcome.calibration.disturbance},
                             {"lanes", lanes}});
}

std::vector<PlanCase> chosen_cases(const std::vector<std::string>& only) {
  if (only.empty()) return plan_cases();
  std::vector<PlanCase> chosen;
  for (const std::string& name : only) {
    const auto found = std::find_if(plan_cases().begin(), plan_cases().end(),
                                    [&](const PlanCase& one) { return one.name == name; });
    if (found == plan_cases().end()) {
      throw Error(ErrorCategory::usage,
                  "bench plan: unknown case '" + name + "'; --list shows all cases");
    }
    chosen.push_back(*found);
  }
  return chosen;
}

/// Budgets that leave choices, and few tokens, so that transfers are visible in the step time.
std::vector<std::string> with_budgets(const std::vector<std::string>& overrides) {
  std::vector<std::string> all = {"ballast.device_bytes=480MiB", "ballast.host_bytes=420MiB",
                                  "data.sequence_length=32"};
  all.insert(all.end(), overrides.begin(), overrides.end());
  return all;
}

void run_choice(const BenchPlanArguments& arguments) {
  const auto directory = std::filesystem::absolute(arguments.path);
  const auto overrides = with_budgets(arguments.overrides);
  const auto planned = make_plan_config(planners_case(), directory, overrides);
  const auto planners = [&] {
    const Outcome outcome = train(decide(planned), arguments);
    print_row(planners_case(), outcome);
    return outcome.measured_step();
  };
  print_head();
  double own = planners();
  double best = std::numeric_limits<double>::infinity();
  std::string_view best_name;
  std::size_t tried = 0;
  for (const PlanCase& one : hand_made_cases()) {
    try {
      const Outcome outcome = train(make_plan_config(one, directory, overrides), arguments);
      print_row(one, outcome);
      ++tried;
      if (outcome.measured_step() >= best) continue;
      best = outcome.measured_step();
      best_name = one.name;
    } catch (const Error& error) {
      if (error.category() != ErrorCategory::memory) throw;
      fmt::print("{:<17}does not fit\n", one.name);
    }
  }
  if (tried == 0) {
    throw Error(ErrorCategory::memory,
                "bench plan: no manual choice fits; raise ballast.host_bytes with --set");
  }
  // The machine's speed may have changed since the first row.
  own = std::min(own, planners());
  fmt::print(
      "fastest of {} manual choices: {}, {:.1f} ms; the planner's choice: {:.1f} ms, {:.2f}x as "
      "fast\n",
      tried, best_name, 1e3 * best, 1e3 * own, best / own);
}

void run_bench(const BenchPlanArguments& arguments) {
  const std::vector<PlanCase> cases = chosen_cases(arguments.only);
  if (arguments.list) {
    for (const PlanCase& one : cases) fmt::print("{:<17}{}\n", one.name, one.what);
    return;
  }
  const auto directory = std::filesystem::absolute(arguments.path);
  if (!arguments.json) print_head();
  std::size_t close = 0;
  text::Json json = text::Json::array();
  for (const PlanCase& one : cases) {
    const Outcome outcome = train(make_plan_config(one, directory, arguments.overrides), arguments);
    if (std::abs(outcome.error()) <= 0.1) ++close;
    if (!arguments.json) print_row(one, outcome);
    json.push_back(json_of(one, outcome));
  }
  if (arguments.json) {
    fmt::print("{}\n", json.pretty(1));
  } else {
    fmt::print("{} of {} predicted step times are within 10% of the measured ones\n", close,
               cases.size());
  }
}

}  // namespace

void add_bench_plan(Command bench) {
  auto arguments = std::make_shared<BenchPlanArguments>();
  auto& a = *arguments;
  Command command =
      bench.add_command("plan", "Compare predicted step times and memory with real steps");
  command.add_option("--only", &a.only, "Cases to run, in this order (default: all)",
                     {.commas = true});
  command.add_flag("--list", &a.list, "List the cases");
  command.add_option("--steps", &a.steps, "Steps of each round, after two warm-up steps",
                     {.range = std::pair(1, 10000), .show_default = true});
  command.add_option("--rounds", &a.rounds, "Rounds, each after its own calibration",
                     {.range = std::pair(1, 1000), .show_default = true});
  command.add_option("--path", &a.path, "Directory to swap to",
                     {.takes = Names::folder, .show_default = true});
  command.add_option("--set", &a.overrides, "Override a config key: path.to.key=value",
                     {.single_argument = true, .takes = Names::setting});
  command.add_flag("--choice", &a.choice,
                   "Let the planner choose, and compare with choices made by hand");
  command.add_flag("--json", &a.json, "Print a JSON array", "--choice");
  command.set_action(
      [arguments] { arguments->choice ? run_choice(*arguments) : run_bench(*arguments); });
}

}  // namespace ballast::tools
