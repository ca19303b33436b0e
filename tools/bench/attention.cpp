#include "ballast/model/attention.h"

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/clocks.h"
#include "ballast/core/error.h"
#include "ballast/device/device.h"
#include "ballast/text/json.h"

#include "tools/bench/bench.h"
#include "tools/command_line.h"
#include "tools/signals.h"

namespace ballast::tools {
namespace {

using model::AttentionPass;
using model::AttentionShape;
using model::AttentionTrial;

struct BenchAttentionArguments {
  std::string device = "cuda";
  AttentionShape extents = {
      .sequences = 4, .length = 2048, .heads = 32, .kv_heads = 8, .head_dim = 128};
  std::uint64_t repeats = 15;
  double seconds = 1.0;
  bool json = false;
};

constexpr std::size_t kMaxPasses = std::size_t{1} << 16U;

struct AttentionTiming {
  AttentionPass pass;
  std::size_t passes = 1;  ///< per wait
  std::vector<double> seconds = {};

  /// Median seconds of one pass.
  [[nodiscard]] double median() const {
    std::vector<double> all = seconds;
    return quantile(all, 0.5) / static_cast<double>(passes);
  }
};

const char* pass_name(AttentionPass pass) {
  return pass == AttentionPass::own_backward ? "backward" : "forward";
}
const char* kernels_name(AttentionPass pass) {
  return pass == AttentionPass::cudnn_forward ? "cudnn" : "own";
}

/// Alternates the passes. Each round starts with another one.
std::vector<AttentionTiming> measure(AttentionTrial& trial,
                                     const BenchAttentionArguments& arguments) {
  std::vector<AttentionTiming> rows = {{AttentionPass::own_forward}, {AttentionPass::own_backward}};
  if (trial.cudnn_refusal().empty()) rows.push_back({AttentionPass::cudnn_forward});
  const auto run = [&](const AttentionTiming& row) {
    return seconds_of([&] { trial.run(row.pass, row.passes); });
  };
  for (AttentionTiming& row : rows) {
    trial.run(row.pass, 1);  // the first call loads the kernels
    while (row.passes < kMaxPasses && run(row) < kShortestSeconds) row.passes *= 2;
  }
  double total = 0.0;
  for (std::size_t round = 0; round < arguments.repeats || total < arguments.seconds; ++round) {
    if (interrupted()) throw Error(ErrorCategory::interrupted, "interrupted");
    for (std::size_t i = 0; i < rows.size(); ++i) {
      AttentionTiming& row = rows[(round + i) % rows.size()];
      row.seconds.push_back(run(row));
      total += row.seconds.back();
    }
  }
  return rows;
}

/// Median over the rounds of the speedup over Ballast's own kernels for that pass.
double ratio(const std::vector<AttentionTiming>& rows, const AttentionTiming& row) {
  if (row.pass != AttentionPass::cudnn_forward) return 1.0;
  const AttentionTiming& own = rows.front();
  std::vector<double> ratios;
  for (std::size_t i = 0; i < row.seconds.size(); ++i) {
    ratios.push_back(own.seconds[i] / static_cast<double>(own.passes) /
                     (row.seconds[i] / static_cast<double>(row.passes)));
  }
  return quantile(ratios, 0.5);
}

void print_table(const std::vector<AttentionTiming>& rows,
                 const BenchAttentionArguments& arguments) {
  const AttentionShape& e = arguments.extents;
  fmt::print(
      "bf16, causal: {} sequences of {} tokens, {} heads ({} for keys and values) of size {}\n",
      e.sequences, e.length, e.heads, e.kv_heads, e.head_dim);
  fmt::print(
      "FLOP: half of 4 (forward) or 10 (backward) x sequences x heads x length^2 x head\n\n");
  fmt::print("  {:<9} {:<6} {:>7} {:>10} {:>9} {:>7}\n", "pass", "kernel", "rounds", "ms",
             "TFLOP/s", "ratio");
  for (const AttentionTiming& row : rows) {
    fmt::print("  {:<9} {:<6} {:>7} {:>10.4f} {:>9.1f} {:>7.2f}\n", pass_name(row.pass),
               kernels_name(row.pass), row.seconds.size(), 1e3 * row.median(),
               attention_flops(e, row.pass) / row.median() * 1e-12, ratio(rows, row));
  }
}

text::Json json_of(const std::vector<AttentionTiming>& rows, const AttentionShape& e) {
  text::Json json = text::Json::array();
  for (const AttentionTiming& row : rows) {
    json.push_back(text::Json::object(
        {{"pass", pass_name(row.pass)},
         {"by", kernels_name(row.pass)},
         {"sequences", e.sequences},
         {"length", e.length},
         {"heads", e.heads},
         {"kv_heads", e.kv_heads},
         {"head_size", e.head_dim},
         {"repeats", row.seconds.size()},
         {"median_seconds", row.median()},
         {"tflop_per_second", attention_flops(e, row.pass) / row.median() * 1e-12},
         {"times_own", ratio(rows, row)}}));
  }
  return json;
}

/// Throws if there is no GPU: the host device has only one implementation.
void require_gpu(const std::string& asked) {
  const std::string refusal = device::cuda_refusal();
  if (bench_device("bench attention", asked == "cuda" ? "auto" : asked) == "cuda") return;
  throw Error(ErrorCategory::device,
              asked == "host"
                  ? "bench attention: the host device has a single implementation, so there is "
                    "nothing to compare; use --device cuda"
                  : "bench attention: needs a CUDA device: " + refusal);
}

void run_bench_attention(const BenchAttentionArguments& arguments) {
  require_gpu(arguments.device);
  const auto device = device::make_device(
      {.kind = "cuda", .budget = round_up(attention_trial_bytes(arguments.extents), kPage)});
  const auto trial = make_attention_trial(*device, arguments.extents);
  const std::vector<AttentionTiming> rows = measure(*trial, arguments);
  if (arguments.json) {
    fmt::print("{}\n", json_of(rows, arguments.extents).pretty(1));
    return;
  }
  fmt::print("{}\n", device->description());
  print_table(rows, arguments);
  if (!trial->cudnn_refusal().empty())
    fmt::print("\ncuDNN is not measured: {}\n", trial->cudnn_refusal());
}

}  // namespace

void add_bench_attention(Command bench) {
  auto arguments = std::make_shared<BenchAttentionArguments>();
  auto& a = *arguments;
  Command command = bench.add_command(
      "attention", "Attention in bf16 on the CUDA device: Ballast's kernels compared with cuDNN's");
  command.add_option("--device", &a.device, "Device to measure; must be cuda",
                     {.values = {"cuda"}, .show_default = true});
  const auto count = [&](const char* name, std::uint64_t* target, const char* what) {
    command.add_option(
        name, target, what,
        {.range = std::pair(std::uint64_t{1}, std::uint64_t{1} << 20U), .show_default = true});
  };
  count("--sequence", &a.extents.length, "Tokens per sequence");
  count("--micro-batch", &a.extents.sequences, "Sequences");
  count("--heads", &a.extents.heads, "Query heads");
  count("--kv-heads", &a.extents.kv_heads, "Key and value heads; must divide --heads");
  count("--head-size", &a.extents.head_dim, "Head dimension: a multiple of 8, at most 512");
  add_limits(command, a.repeats, a.seconds);
  command.add_flag("--json", &a.json, "Print a JSON array");
  command.set_action([arguments] { run_bench_attention(*arguments); });
}

}  // namespace ballast::tools
