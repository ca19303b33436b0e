#include "tools/console/run_output.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <limits>
#include <optional>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "ballast/config/config.h"
#include "ballast/core/error.h"
#include "ballast/core/units.h"

#include "tools/console/terminal.h"
#include "tools/signals.h"

namespace ballast::tools {
namespace {

/// Returns "58.1M", "1.25G".
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

/// Removes the sign of a NaN, which depends on the machine and prints as "-nan".
double without_nan_sign(double value) {
  return std::isnan(value) ? std::numeric_limits<double>::quiet_NaN() : value;
}

/// A step without a target has no loss.
std::string loss_text(std::optional<double> loss) {
  return loss ? fmt::format("{:.4f}", without_nan_sign(*loss)) : "-";
}

/// Returns "75%", the share of pairs whose chosen completion has the larger reward.
std::string accuracy_text(const train::StepMetrics::Rewards& rewards) {
  return fmt::format("{:.0f}%", 100.0 * rewards.accuracy);
}

/// "0.2130", "12.5".
std::string margin_text(const train::StepMetrics::Rewards& rewards) {
  const double margin = without_nan_sign(rewards.margin());
  return std::abs(margin) < 10.0 ? fmt::format("{:.4f}", margin) : fmt::format("{:.3g}", margin);
}

/// Returns ", accuracy 75%, margin 0.2130" for a step on pairs; "" for others.
std::string rewards_text(const std::optional<train::StepMetrics::Rewards>& rewards) {
  if (!rewards) return "";
  return fmt::format(", accuracy {}, margin {}", accuracy_text(*rewards), margin_text(*rewards));
}

/// A column of the table of steps. Narrow terminals drop columns of high rank.
struct Column {
  const char* name;
  std::size_t width;
  std::string text;
  int rank;  ///< 0: always shown
};

std::vector<Column> columns_of(const train::StepReport& report) {
  const auto& metrics = report.metrics;
  const auto memory = [&](Tier tier) { return short_bytes(peak(metrics, tier)); };
  const std::string norm = metrics.skipped
                               ? std::string("skipped")
                               : fmt::format("{:.3g}", without_nan_sign(metrics.grad_norm));
  const std::size_t digits = std::to_string(report.steps).size();
  std::vector<Column> columns = {{"step", std::max<std::size_t>(11, 2 * digits + 1),
                                  fmt::format("{}/{}", metrics.step, report.steps), 0},
                                 {"loss", 7, loss_text(metrics.loss), 0},
                                 {"lr", 8, fmt::format("{:.2e}", metrics.lr), 4},
                                 {"norm", 7, norm, 2},
                                 {"tok/s", 6, format_count(metrics.tokens_per_second), 0},
                                 {"gemm", 5, fmt::format("{:.0f}%", 100.0 * report.gemm_share), 3},
                                 {"device", 6, memory(Tier::device), 5},
                                 {"host", 6, memory(Tier::host), 6},
                                 {"nvme", 6, memory(Tier::nvme), 7},
                                 {"eta", 7, format_seconds(report.eta_seconds), 0}};
  if (metrics.rewards) {
    const std::vector<Column> of_pairs = {{"acc", 4, accuracy_text(*metrics.rewards), 1},
                                          {"margin", 7, margin_text(*metrics.rewards), 1}};
    columns.insert(columns.begin() + 2, of_pairs.begin(), of_pairs.end());
  }
  return columns;
}

/// Removes columns until the table fits.
void narrow(std::vector<Column>& columns, std::size_t width) {
  const auto needed = [&] {
    std::size_t sum = columns.size() - 1;  // gaps
    for (const Column& column : columns) sum += column.width;
    return sum;
  };
  const auto by_rank = [](const Column& a, const Column& b) { return a.rank < b.rank; };
  while (needed() > width) {
    const auto last = std::max_element(columns.begin(), columns.end(), by_rank);
    if (last->rank == 0) return;
    columns.erase(last);
  }
}

std::string line_of(const std::vector<Column>& columns, bool names) {
  std::string line;
  for (const Column& column : columns) {
    if (!line.empty()) line += " ";
    line += fmt::format("{:>{}}", names ? column.name : column.text, column.width);
  }
  return line;
}

std::vector<std::string> exchange_lines(const train::RunSummary& summary) {
  std::vector<std::string> lines;
  if (summary.blueprint.mesh.ranks() == 1) return lines;
  for (const plan::Lane lane : {plan::Lane::gather, plan::Lane::reduce}) {
    const auto i = static_cast<std::size_t>(lane);
    lines.push_back(fmt::format("  {:<17} {} in {}", to_string(lane),
                                format_bytes(summary.totals.lanes.bytes[i]),
                                format_seconds(summary.totals.lanes.busy_seconds[i])));
  }
  return lines;
}

/// Returns "1.9021 nats/token, perplexity 6.7", or for pairs of completions "0.6514 per pair".
std::string held_out_text(double loss, bool pairs) {
  if (pairs) return fmt::format("{:.4f} per pair", without_nan_sign(loss));
  return fmt::format("{:.4f} nats/token, perplexity {:.4g}", without_nan_sign(loss),
                     without_nan_sign(std::exp(loss)));
}

/// Returns "done in 3.1s (2.9s of steps): 20 steps", or how far an interrupted run has come.
std::string ending_of(const train::RunSummary& summary) {
  const std::string times = fmt::format("{} ({} of steps)", format_seconds(summary.seconds),
                                        format_seconds(summary.training_seconds));
  if (!summary.interrupted) return fmt::format("done in {}: {} steps", times, summary.steps);
  // With a checkpoint of the last step, a run is only stopped before it saves its weights.
  const bool unsaved = summary.steps == summary.planned_steps && !summary.checkpoint.empty();
  return fmt::format("interrupted after step {} of {}{}, in {}", summary.steps,
                     summary.planned_steps, unsaved ? ", before its weights were saved" : "",
                     times);
}

/// Returns the lines about the latest checkpoint and, if it is missing, that of the last step.
std::vector<std::string> checkpoint_lines(const train::RunSummary& summary) {
  const std::string latest = summary.checkpoint.string();
  if (!summary.lacks_checkpoint) {
    return latest.empty() ? std::vector<std::string>() : std::vector{"checkpoint in " + latest};
  }
  return {fmt::format("step {} has no checkpoint; {}", summary.steps,
                      latest.empty() ? "this run has none" : "the latest one is " + latest)};
}

}  // namespace

Console::Console(std::string title, std::uint64_t steps_per_print, bool launched, bool live,
                 std::vector<std::string> ending, std::string resuming)
    : title_(std::move(title)),
      steps_per_print_(std::max<std::uint64_t>(1, steps_per_print)),
      launched_(launched),
      ending_(std::move(ending)),
      resuming_(std::move(resuming)),
      live_(live),
      terminal_(!launched && Terminal::available(),
                [this](int error_number) { lose_output(error_number); }) {}

void Console::lose_output(int error_number) {
  if (std::exchange(lost_output_, true)) return;
  // Other programs are ended by SIGPIPE. This one may first write a checkpoint.
  if (error_number == EPIPE) return interrupt();
  const bool closed_terminal = error_number == EIO;
  if (closed_terminal || interrupted()) return;
  log(LogLevel::warning,
      fmt::format("standard output: {}; training continues, and metrics.jsonl has all steps",
                  std::generic_category().message(error_number)));
}

void Console::planned(const engine::Blueprint& blueprint, const std::string& device) {
  if (ending_in_steps_ != nullptr) announce_ending(ending_in_steps_);
  const auto& shape = blueprint.shape;
  const auto show = [this](std::string_view name, const std::string& value) {
    terminal_.show(fmt::format("  {:<17} {}", name, value));
  };
  terminal_.show(title_);
  show("model", fmt::format("{} parameters in {}",
                            format_count(static_cast<double>(blueprint.model.parameters())),
                            to_string(blueprint.type)));
  show("blocks", fmt::format("{} (embedding, layers, head), the units of placement",
                             blueprint.model.blocks.size()));
  show("device", device);
  const std::uint32_t world = blueprint.mesh.ranks();
  if (world > 1) {
    std::string shared;
    if (shape.slices > 1) shared = fmt::format(", {} share each sequence", shape.slices);
    if (blueprint.mesh.tensor > 1) {
      shared += fmt::format(", {} share each layer", blueprint.mesh.tensor);
    }
    show("ranks", fmt::format("{} ranks{}, ZeRO stage {}; memory below is of rank 0", world, shared,
                              blueprint.problem.stage));
  }
  const std::uint32_t sharers = blueprint.mesh.sharers();
  show("batch",
       fmt::format("{}{} x {} x {} = {} tokens per step",
                   sharers > 1 ? fmt::format("{} x ", sharers) : "", blueprint.micro_batches,
                   shape.sequences, shape.length, blueprint.problem.tokens_per_step()));
  for (const auto& line : describe_placement(blueprint)) terminal_.show("  " + line);
  terminal_.show("memory (peak, planned)");
  for (const auto& row : blueprint.ledger.table(blueprint.budgets)) terminal_.show("  " + row);
}

void Console::already_finished(const train::FinishedRun& run) {
  terminal_.show(fmt::format("{} is finished: {} steps{}; nothing is left to do",
                             run.directory.string(), run.steps,
                             run.weights.empty() ? "" : ", weights in " + run.weights.string()));
}

void Console::started(const train::RunStart& start) {
  const data::DataSummary& data = start.data;
  terminal_.show(fmt::format("data   {} file{}, {} tokens to train on, {} held out", data.files,
                             data.files == 1 ? "" : "s",
                             format_count(static_cast<double>(data.training_tokens)),
                             format_count(static_cast<double>(data.evaluation_tokens))));
  if (data.documents > 0) {
    terminal_.show(fmt::format("       {} document{} packed into {} sequence{}, {:.2f}% padding",
                               data.documents, data.documents == 1 ? "" : "s", data.sequences,
                               data.sequences == 1 ? "" : "s", 100.0 * data.padding));
  }
  terminal_.show(fmt::format("speed  {} {} GEMM peak (gemm 100%); update {}{}{}",
                             format_rate(start.gemm_peak_flops, "FLOP"),
                             to_string(start.blueprint.type), start.update_isa,
                             start.io_backend.empty() ? "" : ", NVMe by ", start.io_backend));
  terminal_.show("rate   " + start.rate);
  const std::string written =
      start.filled_on_nvme > 0 ? ", " + format_bytes(start.filled_on_nvme) + " to NVMe" : "";
  const std::string states =
      start.resumed.empty()
          ? "initial states"
          : fmt::format("states of step {} from {}", start.resumed_step, start.resumed.string());
  terminal_.show(
      fmt::format("start  {} in {}{}", states, format_seconds(start.fill_seconds), written));
  if (live_) view_ = std::make_unique<LiveView>(title_, start);
  terminal_.live(fmt::format("step {}/{} running", start.resumed_step + 1, start.steps));
}

/// Prints the header again if the terminal's width, and so its columns, have changed.
void Console::show_step(const train::StepReport& report) {
  std::vector<Column> columns = columns_of(report);
  narrow(columns, terminal_.width());
  const std::string header = line_of(columns, true);
  if (header != header_) terminal_.show(header);
  header_ = header;
  terminal_.show(line_of(columns, false));
}

void Console::stepped(const train::StepReport& report) {
  if (view_) view_->stepped(report);
  const auto& metrics = report.metrics;
  const bool wanted = metrics.step % steps_per_print_ == 0 || metrics.step == report.steps ||
                      metrics.eval_loss.has_value() || metrics.skipped;
  if (wanted && steps_per_print_ < config::kNoProgressLines) show_step(report);
  if (metrics.eval_loss) {
    terminal_.show(fmt::format("{:>11}  {}", "held out",
                               held_out_text(*metrics.eval_loss, metrics.rewards.has_value())));
  }
  if (metrics.step == report.steps) return;
  // The line has room for only one of the two numbers of pairs.
  const std::string accuracy =
      metrics.rewards ? ", accuracy " + accuracy_text(*metrics.rewards) : "";
  terminal_.live(fmt::format("step {}/{} running, loss {}{}, {} tok/s, eta {}", metrics.step + 1,
                             report.steps, loss_text(metrics.loss), accuracy,
                             format_count(metrics.tokens_per_second),
                             format_seconds(report.eta_seconds)));
}

void Console::reading(Bytes done, Bytes total) {
  terminal_.live(fmt::format("reading weights, {} of {}", format_bytes(done), format_bytes(total)));
}

void Console::saving(Bytes done, Bytes total) {
  const auto text =
      fmt::format("saving weights, {} of {}", format_bytes(done), format_bytes(total));
  if (view_) view_->doing(text);
  terminal_.live(text);
}

void Console::show_memory(const train::RunSummary& summary) {
  const auto& blueprint = summary.blueprint;
  for (const Tier tier : kTiers) {
    const Bytes used = summary.totals.allocated[static_cast<std::size_t>(tier)];
    if (used == 0) continue;
    const auto show = [&](std::string_view name, Bytes bytes, const std::string& limit) {
      terminal_.show(fmt::format("  {:<17} {}{} at peak", name, format_bytes(bytes), limit));
    };
    const std::string of_device = " of " + format_bytes(blueprint.budgets.device);
    const std::vector<Bytes>& own = summary.totals.allocated_on_device;
    if (tier == Tier::device && own.size() > 1) {
      for (std::size_t d = 0; d < own.size(); ++d) {
        show(fmt::format("device {}", d), own[d], of_device);
      }
      continue;
    }
    std::string limit;
    if (tier == Tier::device) limit = of_device;
    if (tier == Tier::host) limit = " of " + format_bytes(blueprint.budgets.host);
    show(to_string(tier), used, limit);
  }
}

void Console::show_losses(const train::RunSummary& summary) {
  const std::string skipped =
      fmt::format(", {} step{} skipped", summary.skipped, summary.skipped == 1 ? "" : "s");
  const bool only_saved = summary.training_seconds == 0.0;
  if (!only_saved) {
    terminal_.show(fmt::format("last loss {}{}{}", loss_text(summary.last_loss),
                               rewards_text(summary.last_rewards),
                               summary.skipped > 0 ? skipped : ""));
  }
  if (summary.without_targets > 0) {
    terminal_.show(fmt::format("{} of {} steps had no loss, because no token was trained on",
                               summary.without_targets, summary.steps));
  }
  if (summary.went_back > 0) {
    terminal_.show(fmt::format("went back to a checkpoint {} time{}", summary.went_back,
                               summary.went_back == 1 ? "" : "s"));
  }
}

void Console::show_wear(const train::RunSummary& summary) {
  const Bytes written = summary.totals.nvme_bytes_written();
  if (written == 0) return;
  const std::uint32_t world = summary.blueprint.mesh.ranks();
  terminal_.show(fmt::format("  {:<17} {}{}{}", "written to NVMe", format_bytes(written),
                             world > 1 ? " by rank 0; all ranks of this machine" : "",
                             !summary.wear ? ""
                             : world > 1   ? ":"
                                           : ","));
  if (summary.wear) {
    terminal_.show(wrap(setup::describe(*summary.wear), terminal_.width(), std::string(20, ' ')));
  }
}

void Console::finished(const train::RunSummary& summary) {
  view_.reset();
  announce_ending(nullptr);
  // A launcher that ends a run because a rank has failed sends SIGTERM to the others.
  const bool resumable = !summary.checkpoint.empty();
  if (summary.interrupted && launched_ && !resumable && interrupt_signal() != SIGINT) return;
  const auto& blueprint = summary.blueprint;
  terminal_.show(fmt::format("{}, {} tok/s, {:.0f}% of GEMM peak", ending_of(summary),
                             format_count(summary.tokens_per_second), 100.0 * summary.gemm_share));
  show_losses(summary);
  const auto& blocks = blueprint.placement.blocks;
  if (std::any_of(blocks.begin(), blocks.end(),
                  [](const auto& block) { return block.speculates; })) {
    terminal_.show(fmt::format("speculative updates were repeated in {} of {} steps ({:.1f}%)",
                               summary.rolled_back, summary.steps,
                               100.0 * static_cast<double>(summary.rolled_back) /
                                   std::max(1.0, static_cast<double>(summary.steps))));
  }
  if (summary.predicted_seconds) {
    terminal_.show(fmt::format(
        "predicted {:.3g} s per step, measured {:.3g} s{}", *summary.predicted_seconds,
        summary.step_seconds, summary.corrected_rates ? "; rates corrected for the next run" : ""));
  }
  if (summary.held_out_loss) {
    terminal_.show("held-out loss " + held_out_text(*summary.held_out_loss, blueprint.pairs));
  }
  for (const auto& line : describe_placement(blueprint)) terminal_.show("  " + line);
  show_memory(summary);
  for (const auto& line : exchange_lines(summary)) terminal_.show(line);
  show_wear(summary);
  terminal_.show(
      fmt::format("  {:<17} {} resident at peak", "process", format_bytes(summary.peak_resident)));
  terminal_.show(wrap(summary.advice, terminal_.width(), ""));
  for (const std::string& line : ending_) terminal_.show(line);
  if (!summary.trace.empty()) {
    terminal_.show(fmt::format("trace in {}", summary.trace.string()));
  }
  if (!summary.moved_to.empty()) {
    terminal_.show(fmt::format("the run directory is {} now", summary.moved_to.string()));
  }
  if (!summary.weights.empty()) {
    terminal_.show(fmt::format("weights in {}", summary.weights.string()));
  }
  for (const std::string& line : checkpoint_lines(summary)) terminal_.show(line);
  if (summary.interrupted && resumable) {
    terminal_.show("to continue: " +
                   (summary.moved_to.empty()
                        ? resuming_
                        : fmt::format("the same command with --resume and --out {}",
                                      summary.moved_to.string())));
  }
  summarized_ = true;
}

}  // namespace ballast::tools
