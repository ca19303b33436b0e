#include <algorithm>
#include <array>
#include <cmath>

#include <fmt/format.h>

#include "ballast/calibrate/machine_rates.h"
#include "ballast/core/units.h"
#include "ballast/plan/lane_times.h"
#include "ballast/setup/forecast.h"
#include "ballast/setup/setup.h"
#include "ballast/text/json.h"

namespace ballast::setup {
namespace {

using plan::Lane;
using text::Json;
using Lines = std::vector<std::string>;

std::string seconds_text(double seconds) {
  if (seconds < 1.0) return fmt::format("{:.3g} ms", 1e3 * seconds);
  return seconds < 1000.0 ? fmt::format("{:.3g} s", seconds) : fmt::format("{:.0f} s", seconds);
}

std::string speed_text(double per_second) {
  return per_second < 100.0 ? fmt::format("{:.3g}", per_second) : format_count(per_second);
}

double of(const std::array<double, plan::kLaneCount>& values, Lane lane) {
  return values.at(static_cast<std::size_t>(lane));
}

void add(Lines& lines, std::string_view name, const std::string& text) {
  lines.push_back(fmt::format("  {:<17} {}", name, text));
}

/// Breaks lines of more than 80 columns and indents the rest.
void add_wrapped(Lines& lines, std::string line, std::size_t indent) {
  constexpr std::size_t kColumns = 80;
  while (line.size() > kColumns) {
    const std::size_t end = line.rfind(' ', kColumns);
    lines.push_back(line.substr(0, end));
    line.replace(0, end + 1, indent, ' ');
  }
  lines.push_back(std::move(line));
}

void describe_buffers(const engine::Blueprint& blueprint, Lines& lines) {
  const plan::Schedule& schedule = blueprint.schedule;
  std::string text;
  const auto add_count = [&](plan::BufferId used, std::uint32_t count, std::string_view what) {
    if (used == plan::kNoBuffer) return;
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", what, count);
  };
  add_count(schedule.weight_staging, blueprint.options.buffers.weight_staging, "weights");
  add_count(schedule.state_staging, blueprint.options.buffers.state_staging, "optimizer states");
  add_count(schedule.activation_staging, blueprint.options.buffers.activation_staging,
            "activations");
  add_count(schedule.gradient_staging, blueprint.options.buffers.gradient_staging, "gradients");
  if (!text.empty()) add(lines, "staging buffers", text);
}

/// Parameters of the model that are trained or frozen, and the size of their weights.
struct ModelShare {
  Elems parameters = 0;
  Bytes bytes = 0;
};

ModelShare trained_share(const engine::Blueprint& blueprint) {
  const Elems trained = blueprint.model.trained_parameters();
  return {trained, trained * size_of(blueprint.type)};
}

ModelShare frozen_share(const engine::Blueprint& blueprint) {
  const model::Architecture& model = blueprint.model;
  const Elems frozen = model.parameters() - model.trained_parameters();
  Elems quantized = 0;
  Bytes bytes = 0;
  for (const model::BlockSpec& block : model.blocks) {
    for (const model::TensorSpec& tensor : block.tensors) {
      if (!tensor.quantized) continue;
      quantized += tensor.size;
      bytes += model::QuantizedArrays(*model.quantization, tensor.size).bytes;
    }
  }
  return {frozen, bytes + (frozen - quantized) * size_of(blueprint.type)};
}

std::string share_text(Elems parameters, Bytes bytes) {
  return fmt::format("{} parameters, {}", format_count(static_cast<double>(parameters)),
                     format_bytes(bytes));
}

/// Says what is trained, frozen or passes through, unless everything is trained.
void describe_shares(const Forecast& forecast, Lines& lines) {
  const engine::Blueprint& blueprint = forecast.decision.blueprint;
  const ModelShare trained = trained_share(blueprint);
  const ModelShare frozen = frozen_share(blueprint);
  if (frozen.parameters == 0 && forecast.passing.empty()) return;
  add(lines, "trained", share_text(trained.parameters, trained.bytes));
  if (frozen.parameters > 0) add(lines, "frozen", share_text(frozen.parameters, frozen.bytes));
  for (const PassingShare& share : forecast.passing) {
    add(lines, "passes through",
        fmt::format("{}: {}", share.part, share_text(share.parameters, share.bytes)));
  }
}

void add_shares_json(const Forecast& forecast, Json& out) {
  const auto add_share = [&out](const std::string& name, const ModelShare& share) {
    out[name + "_parameters"] = share.parameters;
    out[name + "_bytes"] = share.bytes;
  };
  add_share("trained", trained_share(forecast.decision.blueprint));
  add_share("frozen", frozen_share(forecast.decision.blueprint));
  out["passing"] = Json::array();
  for (const PassingShare& share : forecast.passing) {
    out["passing"].push_back(Json::object(
        {{"part", share.part}, {"parameters", share.parameters}, {"bytes", share.bytes}}));
  }
}

/// Adds the host memory of a rank that no budget counts.
void describe_unbudgeted(const Forecast& forecast, Lines& lines) {
  const engine::Blueprint& blueprint = forecast.decision.blueprint;
  const config::BallastSection& ballast = forecast.config.ballast;
  const Bytes program = kProgramMemory + (blueprint.mesh.ranks() > 1 ? kMpiMemory : 0);
  std::string text = fmt::format("about {} of host memory for the program", format_bytes(program));
  // Weights are saved block by block, as fp32 values.
  Elems largest = 0;
  for (const model::BlockSpec& block : blueprint.model.blocks) {
    largest = std::max(largest, block.own_elements());
  }
  const Bytes written = blueprint.model.parameters() * size_of(DType::f32);
  const Bytes buffers = std::min<Bytes>(kWriteBuffers, written);
  if (ballast.save_weights) {
    text += fmt::format(", {} more while weights are saved",
                        format_bytes(buffers + largest * size_of(DType::f32)));
  } else if (ballast.writes_checkpoints()) {
    text += fmt::format(", {} more while checkpoints are written", format_bytes(buffers));
  }
  add_wrapped(lines, fmt::format("  {:<17} {}", "not budgeted", text), 20);
}

void describe_run(const Forecast& forecast, Lines& lines) {
  const engine::Blueprint& blueprint = forecast.decision.blueprint;
  const step::Problem& problem = blueprint.problem;
  add(lines, "model",
      fmt::format("{} parameters in {}",
                  format_count(static_cast<double>(blueprint.model.parameters())),
                  to_string(blueprint.type)));
  describe_shares(forecast, lines);
  add(lines, "blocks",
      fmt::format("{} (embedding, layers, head), the units of placement",
                  blueprint.model.blocks.size()));
  std::string machine = forecast.rates.name;
  if (const unsigned runs = forecast.rates.corrections; runs > 0) {
    machine += fmt::format(", rates corrected by {} run{}", runs, runs == 1 ? "" : "s");
  }
  if (const std::string spread = calibrate::describe_spread(forecast.rates); !spread.empty()) {
    machine += ", " + spread;
  }
  add(lines, "machine", machine);
  if (problem.devices > 1) {
    add(lines, "devices",
        fmt::format("{}{}; each has every {} layer", problem.devices,
                    blueprint.mesh.ranks() > 1 ? " of each rank" : "",
                    problem.devices == 2   ? "2nd"
                    : problem.devices == 3 ? "3rd"
                                           : fmt::format("{}th", problem.devices)));
  }
  std::string ranks;
  if (problem.tensor > 1) {
    ranks =
        fmt::format(" x {} group{} of {} ranks that share each layer (stage {})", problem.sharers,
                    problem.sharers == 1 ? "" : "s", problem.tensor, problem.stage);
  } else if (problem.sharers > 1) {
    ranks = fmt::format(" x {} ranks (stage {})", problem.sharers, problem.stage);
  }
  if (const auto parts = blueprint.shape.slices; parts > 1)
    ranks += fmt::format(", {} share each sequence,", parts);
  add(lines, "batch",
      fmt::format("{} x {} x {}{} = {} tokens per step", blueprint.micro_batches,
                  blueprint.shape.sequences, blueprint.shape.length, ranks,
                  problem.tokens_per_step()));
  for (const std::string& line : engine::describe_placement(blueprint)) {
    lines.push_back("  " + line);
  }
  describe_buffers(blueprint, lines);
  const bool several = blueprint.mesh.ranks() > 1;
  lines.push_back(several ? "memory of each rank (peak)" : "memory (peak)");
  for (const std::string& row : blueprint.ledger.table(blueprint.budgets)) {
    lines.push_back("  " + row);
  }
  describe_unbudgeted(forecast, lines);
}

/// Returns whether the training plan has attention of the class.
bool uses(const engine::Blueprint& blueprint, AttentionClass id) {
  const auto& operations = blueprint.schedule.first.operations;
  return std::ranges::any_of(operations, [id](const plan::Operation& operation) {
    return operation.attention_flops > 0.0 && operation.attention == id;
  });
}

/// Says what limits the prediction: slow kernels, and rates that a file lacks.
void describe_kernels(const Forecast& forecast, Lines& lines) {
  const engine::Blueprint& blueprint = forecast.decision.blueprint;
  const plan::Rates& rates = forecast.rates;
  std::vector<std::string> notes;
  if (rates.shared_cores == 0 && uses(blueprint, AttentionClass::plain)) {
    const std::string what = blueprint.type == DType::bf16
                                 ? "attention with heads wider than 256"
                                 : fmt::format("attention in {}", to_string(blueprint.type));
    notes.push_back(what + " runs on slow kernels on GPUs, without tensor cores");
  }
  for (const AttentionClassInfo& info : kAttentionClasses) {
    if (!rates.of(info.id).assumed || !uses(blueprint, info.id)) continue;
    notes.push_back(fmt::format(
        "the file has no rates of {}, so {:.3g} and {:.3g} TFLOP/s are "
        "assumed, forward and backward",
        info.what, 1e-12 * rates.of(info.id).forward, 1e-12 * rates.of(info.id).backward));
  }
  if (rates.adapters_assumed && blueprint.model.adapters) {
    notes.push_back(fmt::format("the file has no adapter_gbps, so {:.3g} GB/s are assumed",
                                1e-9 * rates.adapter_per_second));
  }
  for (const std::string& note : notes) {
    add_wrapped(lines, fmt::format("  {:<17} {}", "note", note), 20);
  }
}

plan::Bottleneck bottleneck_of(const plan::Prediction& prediction) {
  return plan::find_bottleneck(prediction.busy_seconds, prediction.step_seconds);
}

/// Formats the share of a step: "87%".
std::string share_text(const plan::Prediction& prediction, Lane lane) {
  return fmt::format("{:.0f}%",
                     100.0 * of(prediction.busy_seconds, lane) / prediction.step_seconds);
}

/// Descriptions of the lanes, for readers who do not know the names, in the order of Lane.
constexpr std::array<std::string_view, plan::kLaneCount> kWorkOfLanes = {
    "forward, backward", "host to device", "device to host", "between ranks",  "between ranks",
    "optimizer",         "NVMe to host",   "host to NVMe",   "between devices"};

/// Returns ", at most 84% on a device" if that is more than the mean of the devices; else "".
std::string busiest_text(const plan::Prediction& prediction, Lane lane) {
  constexpr double kWorthSaying = 0.02;
  double most = 0.0;
  for (std::size_t number = 0; number < prediction.busy_seconds_by_number.size(); ++number) {
    if (plan::lane_at(number).lane != lane) continue;
    most = std::max(most, prediction.busy_seconds_by_number[number]);
  }
  const double step = prediction.step_seconds;
  if (most - of(prediction.busy_seconds, lane) < kWorthSaying * step) return "";
  return fmt::format(", at most {:.0f}% on a device", 100.0 * most / step);
}

void describe_lanes(const Forecast& forecast, Lines& lines) {
  const plan::Prediction& prediction = forecast.decision.prediction;
  lines.push_back(fmt::format("  {:<10} {:>10} {:>8} {:>10} {:>12}  {}", "lane", "busy", "of step",
                              "waiting", "bytes", "what it does"));
  for (const Lane lane : plan::kLanes) {
    const double busy = of(prediction.busy_seconds, lane);
    if (busy <= 0.0) continue;
    const Bytes bytes = prediction.bytes.at(static_cast<std::size_t>(lane));
    lines.push_back(fmt::format(
        "  {:<10} {:>10} {:>8} {:>10} {:>12}  {}{}", to_string(lane), seconds_text(busy),
        share_text(prediction, lane), seconds_text(of(prediction.stalled_seconds, lane)),
        bytes > 0 ? format_bytes(bytes) : "-", kWorkOfLanes.at(static_cast<std::size_t>(lane)),
        busiest_text(prediction, lane)));
  }
}

void describe_speed(const Forecast& forecast, Lines& lines) {
  const plan::Prediction& prediction = forecast.decision.prediction;
  lines.emplace_back("prediction");
  add(lines, "step",
      fmt::format("{}, {} tokens/s", seconds_text(prediction.step_seconds),
                  speed_text(forecast.tokens_per_second)));
  const plan::Bottleneck bottleneck = bottleneck_of(prediction);
  const auto add_lane = [&](std::string_view name, Lane lane) {
    add(lines, name,
        fmt::format("{} (busy {} of the step)", to_string(lane), share_text(prediction, lane)));
  };
  add_lane("bottleneck", bottleneck.lane);
  if (bottleneck.second) add_lane("second bottleneck", *bottleneck.second);
  add_wrapped(lines, fmt::format("  {:<17} {}", "the run is", describe(bottleneck)), 20);
  if (const std::string idle = planner::describe_idle_devices(forecast.decision.blueprint.problem);
      !idle.empty()) {
    add_wrapped(lines, fmt::format("  {:<17} {}", "warning", idle), 20);
  }
  describe_lanes(forecast, lines);
  if (forecast.wear) {
    const bool alone = forecast.decision.blueprint.mesh.ranks() == 1;
    add(lines, "written to NVMe",
        format_bytes(forecast.nvme_bytes_written) +
            (alone ? " per step," : " per step and rank; all ranks of a machine:"));
    add_wrapped(lines, fmt::format("  {:<17} {}", "", describe(*forecast.wear)), 20);
  }
}

void describe_hiding(const Forecast& forecast, Lines& lines) {
  if (forecast.hiding.empty()) return;
  const auto tokens = static_cast<double>(forecast.decision.blueprint.problem.tokens_per_step());
  lines.push_back(fmt::format("tokens per step that hide transfers and updates (this run: {})",
                              format_count(tokens)));
  for (const HidingPoint& point : forecast.hiding) {
    const double factor = point.tokens / tokens;
    const std::string verdict =
        factor > 1.0 ? fmt::format("{:.1f}x those of this run", factor) : "hidden in this run";
    add(lines, point.what, fmt::format("{}: {}", format_count(std::ceil(point.tokens)), verdict));
  }
}

void add_hiding_json(const Forecast& forecast, Json& out) {
  Json points = Json::object();
  for (const HidingPoint& point : forecast.hiding) points[point.what] = point.tokens;
  out["tokens_to_hide"] = points;
  out["bandwidth_run"] = forecast.bandwidth_run();
}

void add_wear_json(const Forecast& forecast, Json& out) {
  out["nvme_bytes_written"] = forecast.nvme_bytes_written;
  if (!forecast.wear) return;
  out["wear"] = Json::object({{"terabytes_per_day", forecast.wear->terabytes_per_day},
                              {"days", forecast.wear->days},
                              {"rated_bytes", forecast.wear->rated_bytes}});
}

/// Returns the wear with a change that alters it, so that both effects of the change are shown.
std::optional<Wear> wear_with(const planner::Improvement& variant, const Forecast& forecast) {
  constexpr double kWorthSaying = 0.1;
  if (!forecast.wear || std::abs(variant.wear - 1.0) < kWorthSaying) return std::nullopt;
  Wear wear = *forecast.wear;
  wear.terabytes_per_day *= variant.wear;
  wear.days = variant.wear > 0.0 ? wear.days / variant.wear : 0.0;
  return wear;
}

/// Describes the five fastest changes, and those that spare the drives.
void describe_improvements(const Forecast& forecast, Lines& lines) {
  constexpr std::size_t kMax = 5;
  if (!forecast.improvements.empty()) lines.emplace_back("speedup of single changes (simulated)");
  for (std::size_t i = 0; i < forecast.improvements.size(); ++i) {
    const planner::Improvement& variant = forecast.improvements[i];
    if (i >= kMax && !variant.spares_drives()) continue;
    const auto wear = wear_with(variant, forecast);
    add_wrapped(lines,
                fmt::format("  {:>6.2f}x  {}{}", variant.speedup, variant.change,
                            wear ? "; " + describe_writes(*wear) : ""),
                11);
  }
}

}  // namespace

std::vector<std::string> describe(const Forecast& forecast) {
  Lines lines;
  describe_run(forecast, lines);
  describe_speed(forecast, lines);
  describe_kernels(forecast, lines);
  describe_hiding(forecast, lines);
  describe_improvements(forecast, lines);
  return lines;
}

std::string to_json(const Forecast& forecast) {
  const engine::Blueprint& blueprint = forecast.decision.blueprint;
  const plan::Prediction& prediction = forecast.decision.prediction;
  Json out = plan_json(blueprint, &prediction);
  out["tokens_per_second"] = forecast.tokens_per_second;
  out["machine"] = forecast.rates.name;
  if (forecast.rates.spread > 0.0) out["spread_of_rates"] = forecast.rates.spread;
  add_shares_json(forecast, out);
  add_wear_json(forecast, out);
  add_hiding_json(forecast, out);
  out["improvements"] = Json::array();
  for (const planner::Improvement& variant : forecast.improvements) {
    Json one = Json::object({{"change", variant.change},
                             {"tokens_per_second", variant.tokens_per_second},
                             {"speedup", variant.speedup}});
    if (const auto wear = wear_with(variant, forecast)) {
      one["wear"] = describe_writes(*wear);
      one["terabytes_per_day"] = wear->terabytes_per_day;
    }
    out["improvements"].push_back(std::move(one));
  }
  out["simulated"] = forecast.decision.simulated;
  out["config"] = text::parse_json(config::print(forecast.config), "config");
  return out.pretty();
}

}  // namespace ballast::setup
