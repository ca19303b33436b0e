#include "tools/console.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <sstream>

#include <fmt/format.h>
#include <unistd.h>

#include "ballast/core/units.h"

namespace ballast::tools {
namespace {

constexpr std::size_t kWidth = 80;

/// "58.1M", "1.25G".
std::string short_bytes(Bytes bytes) {
  std::string text = format_bytes(bytes);
  text.erase(std::remove(text.begin(), text.end(), ' '), text.end());
  if (text.size() > 3 && text.compare(text.size() - 2, 2, "iB") == 0) text.resize(text.size() - 2);
  return text;
}

Bytes peak(const train::StepMetrics& metrics, Tier tier) {
  const auto found = metrics.peak_bytes.find(std::string(to_string(tier)));
  return found == metrics.peak_bytes.end() ? 0 : found->second;
}

/// Without the sign of a NaN, which depends on the machine and prints as "-nan".
double without_nan_sign(double value) {
  return std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : value;
}

std::string header_line() {
  return fmt::format("{:>11} {:>7} {:>8} {:>7} {:>6} {:>5} {:>6} {:>6} {:>6} {:>7}", "step", "loss",
                     "lr", "norm", "tok/s", "gemm", "device", "host", "nvme", "eta");
}

std::string step_line(const train::StepReport& report) {
  const auto& metrics = report.metrics;
  const std::string norm = metrics.skipped
                               ? std::string("skipped")
                               : fmt::format("{:.3g}", without_nan_sign(metrics.grad_norm));
  return fmt::format(
      "{:>11} {:>7.4f} {:>8.2e} {:>7} {:>6} {:>4.0f}% {:>6} {:>6} {:>6} {:>7}",
      fmt::format("{}/{}", metrics.step, report.steps), without_nan_sign(metrics.loss), metrics.lr,
      norm, format_count(metrics.tokens_per_second), 100.0 * report.gemm_share,
      short_bytes(peak(metrics, Tier::device)), short_bytes(peak(metrics, Tier::host)),
      short_bytes(peak(metrics, Tier::nvme)), format_seconds(report.eta_seconds));
}

void print_ledger(const engine::Blueprint& blueprint) {
  fmt::print("memory (peak, planned)\n");
  for (const auto& row : blueprint.ledger.table(blueprint.budgets)) fmt::print("  {}\n", row);
}

void print_exchange(const train::RunSummary& summary) {
  if (summary.blueprint.workload.world == 1) return;
  for (const schedule::Lane lane : {schedule::Lane::gather, schedule::Lane::reduce}) {
    const auto i = static_cast<std::size_t>(lane);
    fmt::print("  {:<17} {} in {}\n", to_string(lane), format_bytes(summary.totals.lanes.bytes[i]),
               format_seconds(summary.totals.lanes.busy_seconds[i]));
  }
}

}  // namespace

std::string wrap(const std::string& text, std::size_t width, const std::string& indent) {
  std::istringstream words(text);
  std::string result;
  std::string line = indent;
  for (std::string word; words >> word;) {
    if (line.size() > indent.size() && line.size() + 1 + word.size() > width) {
      result += line + "\n";
      line = indent;
    }
    line += (line.size() > indent.size() ? " " : "") + word;
  }
  return result + line;
}

Console::Console(std::string title, std::uint64_t steps_per_print, bool launched)
    : title_(std::move(title)),
      steps_per_print_(std::max<std::uint64_t>(1, steps_per_print)),
      terminal_(!launched && isatty(STDOUT_FILENO) == 1) {}

void Console::planned(const engine::Blueprint& blueprint, const std::string& device) {
  const auto& shape = blueprint.shape;
  fmt::print("{}\n", title_);
  fmt::print("  {:<17} {} parameters in {}, {} blocks\n", "model",
             format_count(static_cast<double>(blueprint.model.parameters())),
             to_string(blueprint.type), blueprint.model.blocks.size());
  fmt::print("  {:<17} {}\n", "device", device);
  const std::uint32_t world = blueprint.workload.world;
  if (world > 1) {
    fmt::print("  {:<17} {} ranks, ZeRO stage {}; memory below is of rank 0\n", "ranks", world,
               blueprint.workload.stage);
  }
  fmt::print("  {:<17} {}{} x {} x {} = {} tokens per step\n", "batch",
             world > 1 ? fmt::format("{} x ", world) : "", blueprint.micro_batches, shape.sequences,
             shape.length, blueprint.workload.tokens_per_step());
  for (const auto& line : describe_placement(blueprint)) fmt::print("  {}\n", line);
  print_ledger(blueprint);
  std::fflush(stdout);
}

void Console::started(const train::RunStart& start) {
  fmt::print("data   {} file{}, {} tokens to train on, {} held out\n", start.files,
             start.files == 1 ? "" : "s",
             format_count(static_cast<double>(start.split.training.size)),
             format_count(static_cast<double>(start.split.held_out.size)));
  fmt::print("speed  {} {} GEMM peak (gemm 100%); update {}{}{}\n",
             format_rate(start.gemm_peak_flops, "FLOP"), to_string(start.blueprint.type),
             start.update_isa, start.io_backend.empty() ? "" : ", NVMe by ", start.io_backend);
  fmt::print("{}\n", header_line());
  std::fflush(stdout);
}

void Console::stepped(const train::StepReport& report) {
  const auto& metrics = report.metrics;
  const bool keep = metrics.step % steps_per_print_ == 0 || metrics.step == report.steps ||
                    metrics.eval_loss.has_value() || metrics.skipped;
  if (terminal_) {
    // Carriage return and "erase to end of line" redraw the line.
    fmt::print("\r{}\x1b[K", step_line(report));
  } else if (keep) {
    fmt::print("{}\n", step_line(report));
  }
  if (metrics.eval_loss) {
    fmt::print("{}{:>11} {:>7.4f} nats/token\n", terminal_ ? "\n" : "", "held out",
               without_nan_sign(*metrics.eval_loss));
  }
  std::fflush(stdout);
}

void Console::finished(const train::RunSummary& summary) {
  const auto& blueprint = summary.blueprint;
  if (terminal_ && !summary.held_out_loss) fmt::print("\n");
  fmt::print("done in {} ({} of steps): {} steps, {} tok/s, {:.0f}% of GEMM peak\n",
             format_seconds(summary.seconds), format_seconds(summary.training_seconds),
             summary.steps, format_count(summary.tokens_per_second), 100.0 * summary.gemm_share);
  fmt::print("last loss {:.4f}", without_nan_sign(summary.last_loss));
  if (summary.skipped > 0) {
    fmt::print(", {} step{} skipped", summary.skipped, summary.skipped == 1 ? "" : "s");
  }
  fmt::print("\n");
  if (summary.predicted_seconds) {
    fmt::print("predicted {:.3g} s per step, measured {:.3g} s{}\n", *summary.predicted_seconds,
               summary.step_seconds,
               summary.corrected_rates ? "; rates corrected for the next run" : "");
  }
  if (summary.held_out_loss)
    fmt::print("held-out loss {:.4f} nats/token\n", without_nan_sign(*summary.held_out_loss));
  for (const auto& line : describe_placement(blueprint)) fmt::print("  {}\n", line);
  for (const Tier tier : kTiers) {
    const Bytes used = summary.totals.allocated[static_cast<std::size_t>(tier)];
    if (used == 0) continue;
    std::string limit;
    if (tier == Tier::device) limit = " of " + format_bytes(blueprint.budgets.device);
    if (tier == Tier::host) limit = " of " + format_bytes(blueprint.budgets.host);
    fmt::print("  {:<17} {}{} at peak\n", to_string(tier), format_bytes(used), limit);
  }
  print_exchange(summary);
  if (const Bytes written = summary.totals.nvme_bytes_written(); written > 0) {
    fmt::print("  {:<17} {}{}\n", "written to NVMe", format_bytes(written),
               summary.wear ? "," : "");
    if (summary.wear) {
      fmt::print("{}\n", wrap(planning::describe(*summary.wear), kWidth, std::string(20, ' ')));
    }
  }
  fmt::print("  {:<17} {} resident at peak\n", "process", format_bytes(summary.peak_resident));
  fmt::print("{}\n", wrap(summary.advice, kWidth, ""));
  std::fflush(stdout);
}

}  // namespace ballast::tools
