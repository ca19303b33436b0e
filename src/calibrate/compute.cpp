#include "ballast/model/compute.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "ballast/calibrate/machine_files.h"
#include "ballast/core/machine.h"
#include "ballast/device/streams.h"
#include "ballast/engine/run_inputs.h"
#include "ballast/plan/executor.h"

#include "src/calibrate/calibration.h"
#include "src/calibrate/timed_passes.h"

namespace ballast::calibrate {
namespace {

using model::CostCurve;

/// Operations of at least this many seconds do not get faster with larger micro-batches.
constexpr double kLong = 0.5;
/// The run's micro-batch size is skipped if an operation would take longer than this, in
/// seconds.
constexpr double kTooLong = 2.0;
/// Least part of a pass that is not memory traffic.
constexpr double kLeastOfPass = 0.2;

/// Bytes per second of clearing and packing buffers that are as cold as the whole model's.
double memory_rate(const Sample& sample) {
  const model::Architecture& model = sample.blueprint.model;
  const DType type = sample.blueprint.type;
  const Bytes accumulator = model.blocks[1].elements * sizeof(float);
  const Bytes packed = model.blocks[1].elements * size_of(type);
  const std::size_t copies = cold_copies(sample, accumulator + packed);
  device::DeviceOptions options = sample.run.devices.first();
  options.compute_threads = sample.run.devices.compute_threads;
  constexpr model::MicroBatchShape kRow = {1, 1};
  const Bytes workspace = model::kernel_memory(model, type, kRow, device::kind_of(options),
                                               sample.run.devices.compute_threads)
                              .workspace;
  options.budget = round_up(workspace, kPage) + kPage +
                   copies * (round_up(accumulator, kPage) + round_up(packed, kPage));
  const auto device = device::make_device(options);
  const auto stream = device->make_stream("calibration");
  const auto compute =
      model::make_compute(*device, model, type, kRow, kernel_options(sample.run.kernels));
  compute->set_workspace(device->allocate(compute->sizes().workspace, "calibration"));
  std::vector<std::array<DeviceBytes, 2>> buffers(copies);
  for (auto& [sums, values] : buffers) {
    sums = device->allocate(accumulator, "accumulator");
    values = device->allocate(packed, "packed gradient");
  }
  const auto stats = device->allocate(sizeof(GradientStats), "calibration");
  const double time = sample.measure(compute_team(sample.run.devices), {}, [&] {
    for (const auto& [sums, values] : buffers) {
      compute->zero(*stream, view_as<float>(sums));
      compute->pack_gradient(*stream, 1, {.own = view_as<float>(sums)}, values,
                             view_as<GradientStats>(stats));
    }
    stream->synchronize();
  });
  return static_cast<double>(copies * (2 * accumulator + packed)) / time;
}

/// Overhead of an operation, measured with two lanes that alternate in copying one byte. Waiting
/// for an idle stream would take no time, while real work on a GPU has to wake the thread.
double launch_seconds(const Sample& sample) {
  constexpr std::uint32_t kTurns = 200;
  device::DeviceOptions options = sample.run.devices.first();
  options.budget = kPage;
  options.compute_threads = 1;
  const auto device = device::make_device(options);
  const auto stream = device->make_stream("calibration");
  plan::Plan plan;
  for (std::uint32_t i = 0; i < kTurns; ++i) {
    plan::Operation operation;
    operation.lane = i % 2 == 0 ? plan::Lane::compute : plan::Lane::upload;
    if (i > 0) operation.after = {i - 1};
    plan.operations.push_back(operation);
  }
  const DeviceBytes place = device->allocate(1, "calibration");
  std::array<std::byte, 1> content = {};
  const auto one_byte = [&](const plan::Operation&, std::uint64_t) {
    device->copy_to_device(*stream, place, content);
    stream->synchronize();
  };
  plan::Executor executor(one_byte, [](const auto&) { return std::string("calibration"); }, {});
  std::uint64_t run = 0;
  const auto turns = [&] {
    executor.submit(plan, ++run);
    executor.drain();
  };
  return sample.measure(1.0, {.least = 5, .most = 7}, turns) / kTurns;
}

/// Returns the FLOPs of attention by class, of one pass on average.
AttentionFlops attention_flops(const TimedPasses& passes, CostCurve curve) {
  AttentionFlops flops{};
  for (const AttentionClassInfo& info : kAttentionClasses) {
    const TimedPasses::Work own = passes.work(curve, info.id);
    if (own.passes == 0.0) continue;
    flops[index_of(info.id)] = own.attention_flops * own.passes / passes.work(curve).passes;
  }
  return flops;
}

/// Returns whether to measure operations of `flops`. `own`: they have the run's micro-batch
/// size.
bool short_enough(const plan::Curve& curve, double flops, bool own) {
  if (curve.empty()) return true;
  return flops / curve.back().flops_per_second < (own ? kTooLong : kLong);
}

}  // namespace

int compute_team(const engine::DeviceRequest& devices) {
  if (!device::shares_host_cores(devices.first())) return 0;
  const int named = devices.compute_threads;
  return named > 0 ? named : device::default_compute_threads();
}

std::uint64_t measurable_length(const Sample& sample) {
  constexpr std::uint64_t kShortLength = 256;
  std::uint64_t length = sample.run.batch.shape.length;
  if (length <= kShortLength) return length;
  Sample shorter = sample;
  shorter.length = kShortLength;
  TimedPasses passes(shorter, {1, kShortLength});
  const double rate = passes.work(CostCurve::forward).flops / passes.seconds(CostCurve::forward);
  const auto seconds = [&] {
    return 3.0 * sample.blueprint.model.forward_flops(1, 1, length) / rate;
  };
  while (length > kShortLength && seconds() > kTooLong) length /= 2;
  return length;
}

void measure_compute(const Sample& sample, plan::Rates& rates) {
  rates.device_memory_per_second = memory_rate(sample);
  std::map<double, LayerWork> work_of_layers;  // by tokens
  const std::uint64_t own_size = sample.run.batch.shape.sequences;
  for (const std::uint64_t size : std::set<std::uint64_t>{1, 2, 4, own_size > 0 ? own_size : 8}) {
    const bool own = size == own_size;
    const double flops = sample.blueprint.model.forward_flops(1, size, sample.length);
    const plan::Curve& slowest = rates.backward.empty() ? rates.forward : rates.backward;
    if (!short_enough(slowest, 3.0 * flops, own)) continue;
    sample.check_interrupt();
    TimedPasses passes(sample, {size, sample.length});
    const auto add = [&](plan::Curve& curve, CostCurve of) {
      const TimedPasses::Work work = passes.work(of);
      if (!(work.flops > 0.0)) return;
      const double all = passes.seconds(of);
      // Plans count the traffic of a pass separately.
      const double traffic = work.traffic / rates.device_memory_per_second;
      curve.push_back({passes.tokens(), work.flops / std::max(all - traffic, kLeastOfPass * all)});
    };
    add(rates.forward, CostCurve::forward);
    add(rates.backward, CostCurve::backward);
    if (short_enough(rates.head, passes.work(CostCurve::head).flops, own)) {
      add(rates.head, CostCurve::head);
    }
    const TimedPasses::Work forward = passes.work(CostCurve::forward);
    const TimedPasses::Work backward = passes.work(CostCurve::backward);
    work_of_layers[passes.tokens()] = {
        .forward = forward.flops,
        .backward = backward.flops,
        .attention = attention_flops(passes, CostCurve::forward),
        .attention_of_backward = attention_flops(passes, CostCurve::backward),
        .adapters = forward.adapter_traffic,
        .adapters_of_backward = backward.adapter_traffic};
  }
  const double largest = rates.forward.back().tokens / static_cast<double>(sample.length);
  sample.check_interrupt();
  separate_parts(rates, measure_parts(sample, static_cast<std::uint64_t>(std::llround(largest))),
                 [&](double tokens) { return work_of_layers.at(tokens); });
  rates.launch_seconds = launch_seconds(sample);
  const int threads = compute_team(sample.run.devices);
  if (threads == 0) return;
  rates.shared_cores = static_cast<unsigned>(usable_cpus());
  rates.compute_threads = static_cast<unsigned>(threads);
}

std::function<void()> layer_passes(const Sample& sample, const plan::Rates& rates) {
  const double length = static_cast<double>(sample.length);
  const double sequences = rates.forward.back().tokens / length;
  const auto passes = std::make_shared<TimedPasses>(
      sample,
      model::MicroBatchShape{static_cast<std::uint64_t>(std::llround(sequences)), sample.length});
  return [passes] { passes->layer_pass(); };
}

}  // namespace ballast::calibrate
