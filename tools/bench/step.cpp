#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ballast/config/config.h"
#include "ballast/core/clocks.h"
#include "ballast/core/error.h"
#include "ballast/device/device.h"
#include "ballast/engine/engine.h"
#include "ballast/model/compute.h"
#include "ballast/setup/run_plan.h"
#include "ballast/setup/setup.h"
#include "ballast/setup/translate.h"
#include "ballast/text/json.h"

#include "tools/bench/bench.h"
#include "tools/bench/step_times.h"
#include "tools/command_line.h"
#include "tools/signals.h"

namespace ballast::tools {
namespace {

struct BenchStepArguments {
  std::string device = "auto";
  std::string model;  ///< folder with a config.json; empty: family and sizes below
  std::string family = "gpt2";
  std::string dtype = "bf16";
  std::uint64_t vocab = 50257;
  std::uint64_t hidden = 768;
  std::uint64_t layers = 12;
  std::uint64_t heads = 12;
  std::uint64_t kv_heads = 0;      ///< 0: the config's default
  std::uint64_t intermediate = 0;  ///< 0: the config's default
  std::uint64_t sequence = 512;
  std::uint64_t batch = 0;         ///< sequences per step; 0: by the other two, or kBatch
  std::uint64_t micro_batch = 0;   ///< 0: derived, or the planner's choice
  std::uint64_t accumulation = 0;  ///< 0: derived, or the planner's choice
  std::uint64_t steps = 3;
  std::vector<std::string> overrides;
  bool breakdown = false;
  bool json = false;
  PageFile html;
};

/// Sequences per step without options.
constexpr std::uint64_t kBatch = 8;

/// The decisions of the planner that a user may want to compare, and the planned memory.
struct StepPlan {
  std::uint64_t micro_batch = 0;  ///< sequences
  std::uint64_t accumulation = 0;
  std::uint64_t recomputed_layers = 0;
  Bytes device_bytes = 0;  ///< planned peak of all devices together
  Bytes host_bytes = 0;    ///< planned peak
  std::string_view product_algorithms;
};

/// Figures of the steps. The GEMM peak is the best rate of the probes before and after the steps,
/// of the passes and of the steps.
struct BenchStepResult {
  std::string kind;  ///< kind of device
  std::string family;
  std::string description;  ///< description of the device
  double parameters = 0.0;
  std::uint64_t tokens = 0;
  double seconds = 0.0;           ///< median step
  double measured_seconds = 0.0;  ///< all steps together
  double flops = 0.0;             ///< FLOPs of a step's matrix products
  double model_flops = 0.0;       ///< FLOPs without recomputation
  std::vector<TimedPass> passes;
  std::vector<KernelRow> kernels;  ///< sums over all steps; empty without --breakdown
  double gemm_peak = 0.0;
  double loss = 0.0;
  std::uint64_t rolled_back = 0;  ///< steps whose speculative updates were undone
  plan::LaneTotals lanes;         ///< totals of all steps
  StepPlan plan;

  [[nodiscard]] double flops_per_second() const { return flops / seconds; }
  [[nodiscard]] double model_per_second() const { return model_flops / seconds; }
  [[nodiscard]] double percent(double per_second) const { return 100.0 * per_second / gemm_peak; }
  /// Columns of the names in the table.
  [[nodiscard]] std::size_t name_width() const {
    std::size_t width = 14;
    for (const TimedPass& pass : passes) width = std::max(width, pass.name.size());
    return width;
  }
};

std::string model_section(const BenchStepArguments& arguments) {
  if (!arguments.model.empty()) {
    return text::Json::object({{"path", arguments.model}}).compact();
  }
  return fmt::format(
      R"({{"family": "{}", "vocab_size": {}, "hidden_size": {}, "num_layers": {}, "num_heads": {},
           "num_kv_heads": {}, "intermediate_size": {}}})",
      arguments.family, arguments.vocab, arguments.hidden, arguments.layers, arguments.heads,
      arguments.kv_heads, arguments.intermediate);
}

/// Returns the keys of the batch: those that the options give, or else "auto".
std::string batch_keys(const BenchStepArguments& arguments) {
  const bool open = arguments.micro_batch == 0 && arguments.accumulation == 0;
  std::string keys;
  const auto add = [&keys](const char* key, std::uint64_t number, std::uint64_t otherwise) {
    const std::uint64_t value = number > 0 ? number : otherwise;
    if (value > 0) keys += fmt::format("\"{}\": {}, ", key, value);
  };
  add("train_batch_size", arguments.batch, open ? kBatch : 0);
  constexpr const char* kMicro = "train_micro_batch_size_per_gpu";
  constexpr const char* kAccumulation = "gradient_accumulation_steps";
  if (open)
    return keys + fmt::format("\"{}\": \"auto\", \"{}\": \"auto\", ", kMicro, kAccumulation);
  const bool derived = arguments.batch > 0;
  add(kMicro, arguments.micro_batch, derived ? 0 : 4);
  add(kAccumulation, arguments.accumulation, derived ? 0 : 2);
  return keys;
}

config::Config make_config(const BenchStepArguments& arguments) {
  // The norm of random weights' gradients exceeds the default limit in every step, so a plan with
  // speculative updates would measure rollbacks.
  const std::string text = fmt::format(
      R"({{"model": {},
          "data": {{"tokens": ["none"], "token_type": "u32", "sequence_length": {}}},
          "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-4}}}},
          "bf16": {{"enabled": {}}},
          {}
          "ballast": {{"device": "{}", "out": ".", "speculative_updates": 0}}}})",
      model_section(arguments), arguments.sequence, arguments.dtype == "bf16" ? "true" : "false",
      batch_keys(arguments), bench_device("bench step", arguments.device));
  return config::parse(text, std::filesystem::current_path(), "bench step", arguments.overrides);
}

/// Runs the steps to measure and adds their results.
void run_steps(const BenchStepArguments& arguments, engine::Engine& engine,
               const engine::TokenBatch& batch, BenchStepResult& result) {
  std::optional<KernelRecording> recording;
  if (arguments.breakdown) recording.emplace();
  std::vector<double> seconds;
  const KernelTime start = std::chrono::steady_clock::now();
  for (std::uint64_t step = 0; step < arguments.steps; ++step) {
    seconds.push_back(seconds_of([&] {
      const engine::StepResult step_result = engine.train_step(batch, 1e-4);
      result.loss = step_result.loss;
      result.rolled_back += step_result.rolled_back ? 1U : 0U;
    }));
  }
  const KernelTime end = std::chrono::steady_clock::now();
  std::sort(seconds.begin(), seconds.end());
  result.seconds = seconds[seconds.size() / 2];
  result.measured_seconds = std::chrono::duration<double>(end - start).count();
  result.lanes = engine.totals().lanes;
  if (!recording) return;
  // Updates of the last step may still run. Their spans are complete when nothing runs.
  engine.finish();
  result.kernels = break_down(recording->take(), start, end);
}

StepPlan plan_of(const engine::Blueprint& blueprint) {
  StepPlan plan = {.micro_batch = blueprint.shape.sequences,
                   .accumulation = blueprint.micro_batches,
                   .device_bytes = blueprint.ledger.total(Tier::device),
                   .host_bytes = blueprint.ledger.total(Tier::host)};
  for (std::size_t b = 0; b < blueprint.problem.blocks.size(); ++b) {
    plan.recomputed_layers += blueprint.problem.index->keeps_intermediates(b) &&
                                      blueprint.placement.blocks[b].kept != step::Kept::all
                                  ? 1U
                                  : 0U;
  }
  return plan;
}

/// Makes an engine and measures its steps. The planner chooses what `config` leaves open.
BenchStepResult measure_steps(const BenchStepArguments& arguments, const config::Config& open) {
  plan::Timeline timeline;
  setup::RunPlan plan = setup::plan_run(open, nullptr, &interrupted());
  const config::Config& config = plan.config;
  engine::Engine engine(std::move(plan.decision.blueprint), setup::engine_options(config),
                        &interrupted());
  engine.start();
  const auto& blueprint = engine.blueprint();
  const std::size_t tokens = blueprint.tokens_per_step();
  const auto inputs = random_ids(tokens, config.model.vocab_size, 1);
  const auto targets = random_ids(tokens, config.model.vocab_size, 2);
  BenchStepResult result;
  result.family = config.model.family;
  result.plan = plan_of(blueprint);
  const bool timed = engine.arithmetic().find("timed choices") != std::string::npos;
  result.plan.product_algorithms = timed ? "timed" : "heuristic";
  result.kind = engine.device().kind();
  result.description = engine.device().description();
  if (arguments.breakdown && result.kind != "host") {
    throw Error(
        ErrorCategory::config,
        "bench step --breakdown measures the kernels of the host device; use --device host, "
        "or for a GPU a profiler such as nsys");
  }
  // The first step has no updates before it; from the third on the pipeline is full.
  for (int warm_up = 0; warm_up < 2; ++warm_up) engine.train_step({inputs, targets}, 1e-4);
  const auto before = engine.totals().lanes;
  engine.record(&timeline);
  run_steps(arguments, engine, {inputs, targets}, result);
  engine.record(nullptr);
  engine.finish();
  result.tokens = tokens;
  result.parameters = static_cast<double>(blueprint.model.parameters());
  result.flops = blueprint.flops_per_step();
  result.model_flops = model_flops_of_step(blueprint);
  result.passes = time_passes(timeline, blueprint);
  for (std::size_t lane = 0; lane < plan::kLaneCount; ++lane) {
    result.lanes.busy_seconds[lane] -= before.busy_seconds[lane];
    result.lanes.enqueueing_seconds[lane] -= before.enqueueing_seconds[lane];
  }
  return result;
}

BenchStepResult measure(const BenchStepArguments& arguments) {
  const config::Config config = make_config(arguments);
  // Runs without an engine, so that the process's peak of memory is that of training.
  const auto gemm_peak = [&] {
    device::DeviceOptions options = setup::device_options(config);
    options.budget = 1;  // the matrices lie outside the device memory
    const auto device = device::make_device(options);
    return model::measure_gemm_peak(*device, options.type, 0.5, config.ballast.kernels);
  };
  const double before = gemm_peak();
  BenchStepResult result = measure_steps(arguments, config);
  // The model's products may be faster than the probe's, which other work may slow down.
  result.gemm_peak = std::max({before, gemm_peak(), result.flops_per_second()});
  for (const TimedPass& pass : result.passes) {
    result.gemm_peak = std::max(result.gemm_peak, pass.flops_per_second());
  }
  return result;
}

std::string time_text(double seconds) {
  return seconds < 0.9995 ? fmt::format("{:.3g} ms", 1e3 * seconds) : format_seconds(seconds);
}

/// Mean seconds per step during which the compute lane has nothing to do.
double waiting_of(const BenchStepArguments& arguments, const BenchStepResult& result) {
  const double busy = result.lanes.busy_seconds[static_cast<std::size_t>(plan::Lane::compute)];
  return std::max(0.0, result.measured_seconds - busy) / static_cast<double>(arguments.steps);
}

void print_plan(const BenchStepArguments& arguments, const BenchStepResult& result) {
  const StepPlan& plan = result.plan;
  const std::size_t width = result.name_width();
  fmt::print("  {:<{}} {} micro-batch{} of {} sequence{}, {} layer{} recomputed\n", "plan", width,
             plan.accumulation, plan.accumulation == 1 ? "" : "es", plan.micro_batch,
             plan.micro_batch == 1 ? "" : "s", plan.recomputed_layers,
             plan.recomputed_layers == 1 ? "" : "s");
  fmt::print("  {:<{}} {} on the device, {} on the host\n", "planned peak", width,
             format_bytes(plan.device_bytes), format_bytes(plan.host_bytes));
  fmt::print("  {:<{}} {:>9} of a step\n", "compute waits", width,
             time_text(waiting_of(arguments, result)));
}

void print_rate(std::string_view name, const std::string& time, double per_second,
                const BenchStepResult& result, std::string_view note) {
  fmt::print("  {:<{}} {:>9} {:>13} {:>6.1f}%{}{}\n", name, result.name_width(), time,
             format_rate(per_second, "FLOP"), result.percent(per_second), note.empty() ? "" : "  ",
             note);
}

void print_table(const BenchStepArguments& arguments, const BenchStepResult& result) {
  fmt::print("{} {} parameters, {}, {} tokens per step, median of {} steps after a warm-up\n",
             result.family, format_count(result.parameters), arguments.dtype, result.tokens,
             arguments.steps);
  const std::size_t width = result.name_width();
  fmt::print("  {:<{}} {}\n", "device", width, result.description);
  fmt::print("  {:<{}} {:>9} {:>13}\n", "step", width, time_text(result.seconds),
             format_count(static_cast<double>(result.tokens) / result.seconds) + " tok/s");
  fmt::print("  {:<{}} {:>9} {:>13}  measured in this run; 100% in the rows below\n", "GEMM peak",
             width, "", format_rate(result.gemm_peak, "FLOP"));
  print_rate("hardware", "", result.flops_per_second(), result,
             "FLOPs of all matrix products / step time");
  print_rate("model (MFU)", "", result.model_per_second(), result,
             "the same without recomputation");
  for (const TimedPass& pass : result.passes) {
    print_rate(pass.name, time_text(pass.seconds), pass.flops_per_second(), result, "");
  }
  print_plan(arguments, result);
  if (result.rolled_back > 0) {
    fmt::print("  {:<{}} {:>9} of {} steps undid their speculative updates\n", "rolled back", width,
               result.rolled_back, arguments.steps);
  }
  for (const plan::Lane lane : plan::kLanes) {
    const double busy = result.lanes.busy_seconds[static_cast<std::size_t>(lane)];
    if (busy <= 0.0) continue;
    const auto per_step = [&](double all) {
      return time_text(all / static_cast<double>(arguments.steps));
    };
    const double launching = result.lanes.enqueueing_seconds[static_cast<std::size_t>(lane)];
    fmt::print("  {:<{}} {:>9} busy per step{}\n", to_string(lane), width, per_step(busy),
               is_queued(lane) ? ", " + per_step(launching) + " to enqueue it" : "");
  }
}

void print_kernels(const BenchStepArguments& arguments, const BenchStepResult& result) {
  double all = 0.0;
  std::size_t width = 0;
  for (const KernelRow& row : result.kernels) {
    all += row.seconds;
    width = std::max(width, row.name.size());
  }
  const auto steps = static_cast<double>(arguments.steps);
  fmt::print(
      "Time of a step by kernel, mean of {} steps; products M x N x K with their share of the GEMM "
      "peak\n",
      arguments.steps);
  for (const KernelRow& row : result.kernels) {
    fmt::print("  {:<{}} {:>9} {:>6.1f}% {:>7} calls", row.name, width,
               time_text(row.seconds / steps), 100.0 * row.seconds / all,
               row.calls / arguments.steps);
    if (row.flops > 0.0) {
      fmt::print(" {:>13} {:>6.1f}%", format_rate(row.flops_per_second(), "FLOP"),
                 result.percent(row.flops_per_second()));
    }
    fmt::print("\n");
  }
  fmt::print("  {:<{}} {:>9}\n", "sum", width, time_text(all / steps));
}

text::Json json_of(const KernelRow& row, const BenchStepArguments& arguments,
                   const BenchStepResult& result) {
  const auto steps = static_cast<double>(arguments.steps);
  return text::Json::object({{"kernel", row.name},
                             {"group", row.group},
                             {"calls", static_cast<double>(row.calls) / steps},
                             {"seconds", row.seconds / steps},
                             {"flops", row.flops / steps},
                             {"flops_per_second", row.flops_per_second()},
                             {"percent_of_gemm_peak", result.percent(row.flops_per_second())}});
}

text::Json json_of(const TimedPass& pass, const BenchStepResult& result) {
  return text::Json::object({{"pass", pass.key},
                             {"block", pass.block},
                             {"operations", pass.count},
                             {"seconds", pass.seconds},
                             {"flops", pass.flops},
                             {"flops_per_second", pass.flops_per_second()},
                             {"percent_of_gemm_peak", result.percent(pass.flops_per_second())}});
}

text::Json json_of(const BenchStepArguments& arguments, const BenchStepResult& result) {
  const auto compute_lane = [&](const auto& seconds) {
    return seconds[static_cast<std::size_t>(plan::Lane::compute)] /
           static_cast<double>(arguments.steps);
  };
  text::Json passes = text::Json::array();
  for (const TimedPass& pass : result.passes) passes.push_back(json_of(pass, result));
  text::Json kernels = text::Json::array();
  for (const KernelRow& row : result.kernels) kernels.push_back(json_of(row, arguments, result));
  return text::Json::object(
      {{"device", result.kind},
       {"family", result.family},
       {"dtype", arguments.dtype},
       {"parameters", result.parameters},
       {"tokens", result.tokens},
       {"step_seconds", result.seconds},
       {"tokens_per_second", static_cast<double>(result.tokens) / result.seconds},
       {"flops_per_second", result.flops_per_second()},
       {"gemm_peak_flops_per_second", result.gemm_peak},
       {"percent_of_gemm_peak", result.percent(result.flops_per_second())},
       {"model_flops_per_second", result.model_per_second()},
       {"model_percent_of_gemm_peak", result.percent(result.model_per_second())},
       {"compute_seconds", compute_lane(result.lanes.busy_seconds)},
       {"compute_enqueueing_seconds", compute_lane(result.lanes.enqueueing_seconds)},
       {"passes", passes},
       {"kernels", kernels},
       {"measured_seconds", result.measured_seconds},
       {"loss", result.loss},
       {"steps", arguments.steps},
       {"rolled_back", result.rolled_back},
       {"waiting_seconds", waiting_of(arguments, result)},
       {"micro_batch", result.plan.micro_batch},
       {"accumulation", result.plan.accumulation},
       {"recomputed_layers", result.plan.recomputed_layers},
       {"device_bytes", result.plan.device_bytes},
       {"host_bytes", result.plan.host_bytes},
       {"product_algorithms", result.plan.product_algorithms}});
}

}  // namespace

void add_bench_step(Command bench) {
  auto arguments = std::make_shared<BenchStepArguments>();
  auto& a = *arguments;
  Command command = bench.add_command(
      "step",
      "Whole training steps, all in memory (default: GPT-2 124M), as a share of the GEMM "
      "peak");
  const auto add = [&](const char* name, Target target, const char* description) {
    command.add_option(name, target, description, {.show_default = true});
  };
  command.add_option("--device", &a.device, kBenchDevices,
                     {.values = {"auto", "host", "cuda"}, .show_default = true});
  command.add_option("--model", &a.model,
                     "Folder with the config.json of the model; instead of family and sizes");
  command.add_option("--family", &a.family, "gpt2 or llama",
                     {.values = {"gpt2", "llama"}, .show_default = true});
  command.add_option("--dtype", &a.dtype, "bf16 or fp32",
                     {.choices = {"bf16", "fp32"}, .show_default = true});
  add("--vocab", &a.vocab, "Vocabulary");
  add("--hidden", &a.hidden, "Width");
  add("--layers", &a.layers, "Layers");
  add("--heads", &a.heads, "Attention heads");
  add("--kv-heads", &a.kv_heads, "llama: key and value heads; 0: same as --heads");
  add("--intermediate", &a.intermediate, "Width of the MLP; 0: 4 (llama: 8/3) times --hidden");
  add("--sequence", &a.sequence, "Tokens per sequence");
  command.add_option("--batch", &a.batch, "Sequences per step (default: 8)", {.positive = true});
  command.add_option(
      "--micro-batch", &a.micro_batch,
      "Sequences per micro-batch (default: the planner chooses, or 4 with --accumulation)",
      {.positive = true});
  command.add_option(
      "--accumulation", &a.accumulation,
      "Micro-batches per step (default: the planner chooses, or 2 with --micro-batch)",
      {.positive = true});
  command.add_option("--steps", &a.steps, "Steps to measure",
                     {.positive = true, .show_default = true});
  command.add_option("--set", &a.overrides, "Override a config key: path.to.key=value",
                     {.single_argument = true, .takes = Names::setting});
  command.add_flag("--breakdown", &a.breakdown,
                   "Also print where a step's time goes by kernel (host device)");
  command.add_flag("--json", &a.json, "Print a JSON array");
  BenchPage::add_options(command, a.html);
  command.set_action([arguments] {
    const BenchPage page("step", arguments->html);
    const BenchStepResult result = measure(*arguments);
    const text::Json rows = text::Json::array({json_of(*arguments, result)});
    if (arguments->json) {
      fmt::print("{}\n", rows.pretty(2));
    } else {
      print_table(*arguments, result);
      if (arguments->breakdown) print_kernels(*arguments, result);
    }
    page.write(rows, !arguments->json);
  });
}

}  // namespace ballast::tools
