#include "src/calibrate/timed_passes.h"

#include <algorithm>
#include <optional>
#include <string_view>

#include "ballast/calibrate/machine_files.h"
#include "ballast/core/error.h"
#include "ballast/core/random.h"
#include "ballast/engine/run_inputs.h"

namespace ballast::calibrate {

using model::Operand;
using model::OperandKind;
using model::Port;

std::vector<model::PassId> training_passes(const model::StepProgram& program) {
  const auto& stops = program.training;
  const bool visits = std::ranges::any_of(
      stops, [](const model::Stop& stop) { return stop.form == model::HeadForm::visits; });
  std::vector<model::PassId> order;
  for (const model::Stop& stop : stops) {
    if (visits && stop.form == model::HeadForm::one_pass) continue;
    order.insert(order.end(), stop.passes.begin(), stop.passes.end());
  }
  return order;
}

bool is_bound(const Operand& operand) {
  const bool kept = operand.port == Port::kept || operand.port == Port::kept_attention;
  return operand.kind != OperandKind::workspace && !(kept && operand.optional);
}

Bytes bytes_of(const Operand& operand, const model::StepProgram& program,
               const model::Architecture& model, DType type) {
  switch (operand.kind) {
    case OperandKind::weights:
      return model.blocks[operand.number].own_elements() * size_of(type);
    case OperandKind::rows: {
      const model::StepBlock& table = program.blocks[operand.number];
      return operand.access == model::OperandAccess::reads ? table.selected : table.row_gradients;
    }
    case OperandKind::value:
      return program.bytes_of(program.values[operand.number]);
    case OperandKind::gradient:
      return program.sums[operand.number].bytes;
    case OperandKind::workspace:
      break;
  }
  return 0;
}

model::PassArguments bind_pass(const model::Pass& pass, std::uint64_t tokens,
                               std::span<const DeviceBytes> memory) {
  expects(memory.size() == pass.operands.size(), "bind_pass: memory for other operands");
  model::PassArguments arguments;
  for (std::size_t i = 0; i < memory.size(); ++i) {
    if (memory[i].empty()) continue;
    switch (pass.operands[i].port) {
      case Port::routing_counts:
      case Port::all_routing_counts:
        break;
      case Port::batch:
        arguments.batch = model::BatchViews::cut(memory[i], tokens);
        break;
      case Port::output_weights:
        arguments.output_weights.push_back(memory[i]);
        break;
      case Port::output_gradient:
        arguments.output_gradient.push_back(memory[i]);
        break;
      default:
        arguments[pass.operands[i].port] = memory[i];
    }
  }
  return arguments;
}

namespace {

using model::CostCurve;
using model::Kernel;
using model::Pass;

/// Longer operations are not repeated often, but a single one may have been disturbed.
constexpr double kLongPass = 0.5;
/// Longer operations need no warm-up call.
constexpr double kWarm = 0.1;
/// Shorter kernels are enqueued and timed several at a time, like in a step. If other work comes
/// between them, only kernels shorter than kVeryShort are, because a clock cannot resolve them.
constexpr double kShort = 0.02;
constexpr double kVeryShort = 0.002;
constexpr std::size_t kMaxTogether = 64;
/// Seconds in which a pass is repeated, divided by the kinds of passes.
constexpr double kRepeated = 0.2;

/// At most `most` bytes of values around zero. The prime length prevents equal rows in a matrix.
template <class T>
std::vector<std::byte> pattern(float scale, Bytes most) {
  constexpr std::size_t kValues = 65521;
  const std::size_t count = std::min<std::size_t>(kValues, most / sizeof(T));
  std::vector<std::byte> bytes(count * sizeof(T));
  auto* values = reinterpret_cast<T*>(bytes.data());
  for (std::size_t i = 0; i < count; ++i) {
    const float unit = static_cast<float>(random_u64(1, i) % 20001) / 10000.0F - 1.0F;
    values[i] = from_float<T>(unit * scale);
  }
  return bytes;
}

/// Size of the values of an argument in the training type; nothing for others, which are zero.
/// Zeros are valid tokens.
std::optional<float> scale_of(Port port) {
  switch (port) {
    case Port::weights:
    case Port::output_weights:
      return 0.02F;
    case Port::input:
    case Port::output:
    case Port::keys_values:
    case Port::layer_inputs:
    case Port::table_rows:
      return 1.0F;
    case Port::activation_gradient:
    case Port::layer_inputs_gradient:
      return 1e-3F;
    default:
      return std::nullopt;
  }
}

bool is_of_head(Kernel kernel) {
  return kernel == Kernel::head_train;
}

/// Returns the curve of a pass that is timed, or nothing. Other passes of the sample are bound by
/// memory.
std::optional<CostCurve> timed_curve(Kernel kernel) {
  if (kernel == Kernel::layer) return CostCurve::forward;
  if (kernel == Kernel::layer_backward) return CostCurve::backward;
  return is_of_head(kernel) ? std::optional(CostCurve::head) : std::nullopt;
}

/// Returns the cost of a pass without its optional arguments.
model::PassCost cost_of_bound(const Pass& pass) {
  model::PassCost cost = pass.cost;
  for (const Operand& operand : pass.operands) {
    if (!is_bound(operand)) cost += operand.absent;
  }
  return cost;
}

}  // namespace

TimedPasses::TimedPasses(const Sample& sample, model::MicroBatchShape shape)
    : model_(sample.computed),
      type_(sample.blueprint.type),
      shape_(shape),
      accumulation_(usual_accumulation(sample.run.batch)),
      sample_(sample) {
  device::DeviceOptions options = sample.run.devices.first();
  options.compute_threads = sample.run.devices.compute_threads;
  const model::KernelSizes sizes = model::kernel_memory(
      model_, type_, shape_, device::kind_of(options), sample.run.devices.compute_threads);
  program_ = model::write_program(model_, type_, {.micro_batch = shape_}, sizes);
  find_kinds();
  find_slots();
  copies_ = cold_copies(sample, sizes_[{Port::weights}] + sizes_[{Port::gradient}]);
  options.budget = round_up(sizes.workspace, kPage);
  for (const auto& [slot, bytes] : sizes_) {
    options.budget += copies_of(slot) * round_up(bytes, kPage);
  }
  device_ = device::make_device(options);
  stream_ = device_->make_stream("calibration");
  compute_ =
      model::make_compute(*device_, model_, type_, shape_, kernel_options(sample.run.kernels));
  // All memory is touched first, because page faults cost more than most kernels.
  const DeviceBytes workspace = device_->allocate(compute_->sizes().workspace, "calibration");
  fill(workspace, 1.0F);
  compute_->set_workspace(workspace);
  allocate_slots();
}

void TimedPasses::find_kinds() {
  for (const model::PassId id : training_passes(program_)) {
    const Pass& pass = program_.passes[id];
    const std::optional<CostCurve> curve = timed_curve(pass.kernel);
    if (!curve) continue;
    std::vector<Kind>& kinds = kinds_[static_cast<std::size_t>(*curve)];
    const model::PassCost cost = cost_of_bound(pass);
    // Layers that differ only in their windows have the same shape.
    const auto same = std::ranges::find_if(kinds, [&](const Kind& kind) {
      return program_.passes[kind.pass].shape == pass.shape && kind.cost == cost;
    });
    if (same == kinds.end()) {
      kinds.push_back({id, 1.0, cost});
    } else {
      same->count += 1.0;
    }
  }
}

std::vector<TimedPasses::Slot> TimedPasses::slots_of(const Pass& pass) const {
  std::vector<Slot> slots;
  slots.reserve(pass.operands.size());
  for (const Operand& operand : pass.operands) {
    Slot slot = {.port = operand.port, .head = is_of_head(pass.kernel)};
    while (std::ranges::find(slots, slot) != slots.end()) ++slot.number;
    slots.push_back(slot);
  }
  return slots;
}

void TimedPasses::find_slots() {
  for (const std::vector<Kind>& kinds : kinds_) {
    for (const Kind& kind : kinds) {
      const Pass& pass = program_.passes[kind.pass];
      const std::vector<Slot> slots = slots_of(pass);
      for (std::size_t i = 0; i < slots.size(); ++i) {
        if (!is_bound(pass.operands[i])) continue;
        Bytes& size = sizes_[slots[i]];
        size = std::max(size, bytes_of(pass.operands[i], program_, model_, type_));
      }
    }
  }
}

std::size_t TimedPasses::copies_of(const Slot& slot) const {
  const bool of_layer = !slot.head && (slot.port == Port::weights || slot.port == Port::gradient);
  return of_layer ? copies_ : 1;
}

void TimedPasses::allocate_slots() {
  for (const auto& [slot, bytes] : sizes_) {
    std::vector<DeviceBytes>& copies = memory_[slot];
    copies.resize(copies_of(slot));
    if (bytes == 0) continue;
    for (DeviceBytes& memory : copies) {
      memory = device_->allocate(bytes, "calibration");
      if (const std::optional<float> scale = scale_of(slot.port)) {
        fill(memory, *scale);
      } else {
        compute_->zero(*stream_, view_as<float>(memory));
      }
    }
  }
  stream_->synchronize();
}

void TimedPasses::fill(DeviceBytes bytes, float scale) {
  const auto values = with_training_type(
      type_, [&](auto value) { return pattern<decltype(value)>(scale, bytes.size()); });
  for (std::size_t done = 0; done < bytes.size();) {
    const std::size_t size = std::min(values.size(), bytes.size() - done);
    device_->copy_to_device(*stream_, bytes.subview(done, size),
                            ConstHostBytes(values).first(size));
    done += size;
  }
  stream_->synchronize();
}

std::vector<TimedPasses::Kind> TimedPasses::kinds(CostCurve curve,
                                                  std::optional<AttentionClass> only) const {
  std::vector<Kind> found = kinds_[static_cast<std::size_t>(curve)];
  if (!only) return found;
  std::erase_if(found, [&](const Kind& kind) {
    return kind.cost.attention_flops == 0.0 ||
           program_.blocks[program_.passes[kind.pass].block].attention != *only;
  });
  return found;
}

TimedPasses::Work TimedPasses::work(CostCurve curve, std::optional<AttentionClass> only) const {
  Work work;
  for (const Kind& kind : kinds(curve, only)) {
    work.adapter_traffic += kind.count * static_cast<double>(kind.cost.adapter_traffic);
    work.flops += kind.count * kind.cost.flops;
    work.attention_flops += kind.count * kind.cost.attention_flops;
    work.traffic += kind.count * static_cast<double>(kind.cost.traffic);
    work.passes += kind.count;
  }
  for (double* sum : {&work.flops, &work.attention_flops, &work.adapter_traffic, &work.traffic}) {
    *sum /= std::max(work.passes, 1.0);
  }
  return work;
}

double TimedPasses::seconds(CostCurve curve, std::optional<AttentionClass> only) {
  double sum = 0.0;
  double passes = 0.0;
  const std::vector<Kind> measured = kinds(curve, only);
  for (const Kind& kind : measured) {
    sum += kind.count * seconds(kind, measured.size());
    passes += kind.count;
  }
  return passes > 0.0 ? sum / passes : 0.0;
}

void TimedPasses::layer_pass() {
  for (const CostCurve curve : {CostCurve::forward, CostCurve::backward}) {
    const std::vector<Kind>& all = kinds_[static_cast<std::size_t>(curve)];
    if (!all.empty()) enqueue(all[layer_turn_ % all.size()]);
  }
  ++layer_turn_;
  stream_->synchronize();
}

void TimedPasses::run_each() {
  for (const std::vector<Kind>& kinds : kinds_) {
    for (const Kind& kind : kinds) {
      enqueue(kind);
      stream_->synchronize();
    }
  }
}

void TimedPasses::enqueue(const Kind& kind) {
  const Pass& pass = program_.passes[kind.pass];
  const std::vector<Slot> slots = slots_of(pass);
  // All other layers of a model also come between two uses of a layer.
  const std::size_t turn = turn_++;
  std::vector<DeviceBytes> memory;
  memory.reserve(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    DeviceBytes bytes;
    if (is_bound(pass.operands[i])) {
      const std::vector<DeviceBytes>& copies = memory_.at(slots[i]);
      bytes = copies[turn % copies.size()];
      // A block's tensors after the gradient's end are frozen.
      bytes = bytes.subview(0, bytes_of(pass.operands[i], program_, model_, type_));
    }
    memory.push_back(bytes);
  }
  model::PassArguments arguments = bind_pass(pass, shape_.tokens(), memory);
  arguments.scalars.accumulation = accumulation_;
  arguments.scalars.dropout = {.on = true, .key = 11};
  arguments.scalars.loss_gradient = 1e-3F;
  compute_->run(*stream_, pass, arguments);
}

/// Seconds of one pass of a kind.
double TimedPasses::seconds(const Kind& kind, std::size_t kinds) {
  const auto several = [&](std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) enqueue(kind);
    stream_->synchronize();
  };
  const double cpus = compute_team(sample_.run.devices);
  std::vector<Slice> slices;
  const auto time = [&] {
    SliceClock clock;
    clock.start();
    several(1);
    slices.push_back(clock.stop());
    return undisturbed_time({&slices.back(), 1}, {cpus, sample_.busy}).seconds;
  };
  double once = time();
  if (once < kWarm) {
    slices.clear();  // the first call initialized shared state
    once = time();
  }
  if (once >= kWarm) {
    const std::size_t least = once >= kLongPass ? 2 : 3;
    while (slices.size() < least) time();
    return sample_.record(undisturbed_time(slices, {cpus, sample_.busy}));
  }
  const bool head = is_of_head(program_.passes[kind.pass].kernel);
  const double shortest = head || sample_.busy ? kVeryShort : kShort;
  const auto together =
      std::clamp<std::size_t>(static_cast<std::size_t>(shortest / once), 1, kMaxTogether);
  const Repeats repeats = {.seconds = kRepeated / static_cast<double>(kinds),
                           .least = sample_.busy ? 3U : 5U,
                           .most = 50};
  const auto prepare = [&] {
    if (!head) return;
    // The head runs once per micro-batch: the layers evict its data from the caches.
    const auto sums = memory_.find({Port::gradient});
    if (sums == memory_.end()) return;
    for (const DeviceBytes& layer : sums->second) {
      compute_->zero(*stream_, view_as<float>(layer));
    }
    stream_->synchronize();
  };
  return sample_.measure(
             cpus, repeats, [&] { several(together); }, prepare) /
         static_cast<double>(together);
}

}  // namespace ballast::calibrate
