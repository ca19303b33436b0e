#include "src/engine/step.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "ballast/core/error.h"

#include "src/engine/state_layout.h"

namespace ballast::engine {
namespace {

using schedule::Action;
using schedule::Operation;
using schedule::Role;

/// The operation at hand with the buffers it names, cut to the sizes of its block.
class Step {
 public:
  Step(Machine& machine, const Operation& operation, StepContext& context)
      : machine_(machine), operation_(operation), context_(context) {}

  // fetch, writeback: NVMe and host staging
  void fetch_weights() { fetch(Role::weights_source, Role::weights, work().weight_bytes, false); }
  /// States are read ahead of their update; the weights of a pass are wanted sooner.
  void fetch_states() { fetch(Role::states_source, Role::states, work().state_bytes, true); }
  void fetch_activation() { fetch(Role::input, Role::output, swapped_bytes(), false); }
  void writeback_weights() { writeback(Role::weights_source, Role::weights, work().weight_bytes); }
  void writeback_states() { writeback(Role::states_source, Role::states, work().state_bytes); }
  void writeback_activation() { writeback(Role::input, Role::output, swapped_bytes()); }

  // upload, offload: host and device
  void upload_batch() {
    const Bytes bytes = machine_.blueprint.workload.batch_bytes;
    upload(Role::batch_source, Role::batch, bytes);
  }
  void upload_weights() { upload(Role::weights_source, Role::weights, work().weight_bytes); }
  void upload_activation() { upload(Role::input, Role::output, activation_bytes()); }
  void offload_weights() { offload(Role::weights_source, Role::weights, work().weight_bytes); }
  void offload_activation() { offload(Role::input, Role::output, activation_bytes()); }
  void offload_gradient() { offload(Role::gradient_source, Role::gradient, work().gradient_bytes); }
  void offload_statistics() {
    offload(Role::statistics_source, Role::statistics,
            machine_.blueprint.workload.statistics_bytes);
  }
  void offload_losses() {
    offload(Role::losses_source, Role::losses, machine_.blueprint.workload.losses_bytes);
  }

  // compute
  void forward() {
    auto& stream = *machine_.compute_stream;
    const DeviceBytes out = device(Role::output, activation_bytes());
    if (operation_.block == 0) {
      machine_.compute.embedding_forward(stream, weights(), tokens(), out);
    } else {
      machine_.compute.layer_forward(stream, operation_.block, weights(),
                                     device(Role::input, activation_bytes()), out);
    }
    stream.synchronize();
  }

  void backward() {
    auto& stream = *machine_.compute_stream;
    const DeviceBytes flow = device(Role::gradient_flow, activation_bytes());
    if (operation_.block == 0) {
      machine_.compute.embedding_backward(stream, tokens(), flow, accumulator());
    } else {
      machine_.compute.layer_backward(stream, operation_.block, weights(),
                                      device(Role::input, activation_bytes()), flow, accumulator());
    }
    stream.synchronize();
  }

  void evaluate_head() {
    auto& stream = *machine_.compute_stream;
    machine_.compute.head_forward(stream, weights(), tied_weights(),
                                  device(Role::input, activation_bytes()), targets(), loss());
    stream.synchronize();
  }

  void train_head() {
    auto& stream = *machine_.compute_stream;
    const auto scale = static_cast<float>(1.0 / static_cast<double>(tokens_in_step()));
    machine_.compute.head_train(stream, weights(), tied_weights(),
                                device(Role::input, activation_bytes()), targets(), scale,
                                device(Role::gradient_flow, activation_bytes()), accumulator(),
                                tied_accumulator(), loss());
    stream.synchronize();
  }

  void clear_gradient() {
    auto& stream = *machine_.compute_stream;
    machine_.compute.zero(stream, accumulator());
    if (!tied_accumulator().empty()) machine_.compute.zero(stream, tied_accumulator());
    stream.synchronize();
  }

  void pack_gradient() {
    auto& stream = *machine_.compute_stream;
    machine_.compute.pack_gradient(
        stream, accumulator(), tied_accumulator(), device(Role::gradient, work().gradient_bytes),
        view_as<model::GradientStats>(device(Role::statistics, sizeof(model::GradientStats))));
    stream.synchronize();
  }

  // update
  /// Loss, global norm (blocks in order, in double) and what follows from it: the clip coefficient
  /// of DeepSpeed, norm' = (norm + 1e-6) / clip, coefficient = 1 / max(1, norm').
  void gate() {
    const HostBytes bytes = host(Role::losses, machine_.blueprint.workload.losses_bytes);
    const auto* losses = reinterpret_cast<const double*>(bytes.data());
    double loss = 0.0;
    for (std::uint32_t m = 0; m < context_.micro_batches; ++m) loss += losses[m];
    context_.result.loss = loss / static_cast<double>(tokens_in_step());
    if (!has(Role::statistics)) return;
    double squares = 0.0;
    std::uint64_t non_finite = 0;
    for (const schedule::Use& use : operation_.uses) {
      if (use.role != Role::statistics) continue;
      const model::GradientStats block = statistics(use.buffer);
      squares += block.sum_of_squares;
      non_finite += block.non_finite;
    }
    const double norm = std::sqrt(squares);
    context_.result.grad_norm = norm;
    context_.result.skipped = non_finite != 0 || !std::isfinite(norm);
    // Eager updates do not wait for this and are not clipped.
    if (machine_.blueprint.options.update == schedule::Update::eager) return;
    const double clip = machine_.config.gradient_clipping;
    const double excess = clip > 0.0 ? (norm + 1e-6) / clip : 0.0;
    context_.hyper.gradient_scale = excess > 1.0 ? static_cast<float>(1.0 / excess) : 1.0F;
  }

  void update_on_host() {
    if (!allowed()) return;
    update(host(Role::weights, work().weight_bytes).data(),
           host(Role::states, work().state_bytes).data(),
           host(Role::gradient, work().gradient_bytes).data());
  }

  /// On the host device, device memory is the processor's own and the host kernel does the work.
  void update_on_device() {
    if (!allowed()) return;
    expects(machine_.device.kind() == "host", "update on this device is not in this version");
    update(device(Role::weights, work().weight_bytes).raw(),
           device(Role::states, work().state_bytes).raw(),
           device(Role::gradient, work().gradient_bytes).raw());
  }

 private:
  [[nodiscard]] const schedule::BlockWork& work() const {
    return machine_.blueprint.workload.blocks[operation_.block];
  }
  [[nodiscard]] Bytes activation_bytes() const {
    return machine_.blueprint.workload.activation_bytes;
  }
  /// Of an activation on its way to or from NVMe.
  [[nodiscard]] Bytes swapped_bytes() const { return round_up(activation_bytes(), kPage); }
  [[nodiscard]] std::uint64_t tokens_in_step() const {
    return context_.micro_batches * machine_.blueprint.shape.tokens();
  }
  [[nodiscard]] HostBytes host(Role role, Bytes bytes) const {
    return machine_.store.host(operation_.buffer(role), bytes);
  }
  [[nodiscard]] DeviceBytes device(Role role, Bytes bytes) const {
    return machine_.store.device(operation_.buffer(role), bytes);
  }
  [[nodiscard]] bool has(Role role) const { return operation_.buffer(role) != schedule::kNoBuffer; }

  [[nodiscard]] DeviceBytes weights() const { return device(Role::weights, work().weight_bytes); }
  [[nodiscard]] ConstDeviceBytes tied_weights() const {
    if (!has(Role::tied_weights)) return {};
    return device(Role::tied_weights, machine_.blueprint.workload.blocks[0].weight_bytes);
  }
  [[nodiscard]] DeviceView<float> accumulator() const {
    return view_as<float>(device(Role::accumulator, work().accumulator_bytes));
  }
  [[nodiscard]] DeviceView<float> tied_accumulator() const {
    if (!has(Role::tied_accumulator)) return {};
    return view_as<float>(
        device(Role::tied_accumulator, machine_.blueprint.workload.tied_accumulator_bytes));
  }
  [[nodiscard]] DeviceView<const std::int32_t> batch_part(std::size_t part) const {
    const Bytes bytes = machine_.blueprint.workload.batch_bytes;
    const auto ids = view_as<const std::int32_t>(ConstDeviceBytes(device(Role::batch, bytes)));
    return ids.subview(part * (ids.size() / 2), ids.size() / 2);
  }
  [[nodiscard]] DeviceView<const std::int32_t> tokens() const { return batch_part(0); }
  [[nodiscard]] DeviceView<const std::int32_t> targets() const { return batch_part(1); }

  [[nodiscard]] DeviceView<double> loss() const {
    const DeviceBytes all = device(Role::losses, machine_.blueprint.workload.losses_bytes);
    return view_as<double>(all.subview(operation_.micro * sizeof(double), sizeof(double)));
  }
  [[nodiscard]] model::GradientStats statistics(schedule::BufferId buffer) const {
    model::GradientStats found;
    std::memcpy(&found, machine_.store.host(buffer, sizeof found).data(), sizeof found);
    return found;
  }

  /// Whether the update may happen. Behind the gate, that is the gate's decision. Without it
  /// (eager) other blocks of the step are updated already when a gradient turns out not to be
  /// finite, so that the step cannot be skipped as a whole.
  [[nodiscard]] bool allowed() const {
    if (!has(Role::statistics)) return !context_.result.skipped;
    if (statistics(operation_.buffer(Role::statistics)).non_finite == 0) return true;
    throw Error(ErrorCategory::numeric,
                "the gradient is not finite, and blocks behind this one are updated already; use "
                "ballast.update \"gated\", which skips such steps, or lower the learning rate");
  }

  void fetch(Role from, Role to, Bytes bytes, bool ahead) {
    machine_.store.fetch(operation_.buffer(from), host(to, bytes), ahead);
  }
  void writeback(Role from, Role to, Bytes bytes) {
    machine_.store.writeback(operation_.buffer(to), host(from, bytes));
  }
  void upload(Role from, Role to, Bytes bytes) {
    machine_.device.copy_to_device(*machine_.upload_stream, device(to, bytes), host(from, bytes));
    machine_.upload_stream->synchronize();
  }
  void offload(Role from, Role to, Bytes bytes) {
    machine_.device.copy_to_host(*machine_.offload_stream, host(to, bytes), device(from, bytes));
    machine_.offload_stream->synchronize();
  }

  void update(std::byte* weights, std::byte* states, const std::byte* gradient) {
    machine_.updater.step(context_.hyper, make_shard(machine_.blueprint, operation_.block, weights,
                                                     states, gradient));
  }

  Machine& machine_;
  const Operation& operation_;
  StepContext& context_;
};

}  // namespace

void perform(Machine& machine, const Operation& operation, std::uint64_t run) {
  Step step(machine, operation, machine.context(run - operation.lag));
  switch (operation.action) {
    case Action::upload_batch:
      return step.upload_batch();
    case Action::fetch_weights:
      return step.fetch_weights();
    case Action::upload_weights:
      return step.upload_weights();
    case Action::forward:
      return step.forward();
    case Action::evaluate_head:
      return step.evaluate_head();
    case Action::train_head:
      return step.train_head();
    case Action::offload_activation:
      return step.offload_activation();
    case Action::upload_activation:
      return step.upload_activation();
    case Action::clear_gradient:
      return step.clear_gradient();
    case Action::backward:
      return step.backward();
    case Action::pack_gradient:
      return step.pack_gradient();
    case Action::offload_gradient:
      return step.offload_gradient();
    case Action::offload_statistics:
      return step.offload_statistics();
    case Action::offload_losses:
      return step.offload_losses();
    case Action::writeback_activation:
      return step.writeback_activation();
    case Action::fetch_activation:
      return step.fetch_activation();
    case Action::gather_weights:
    case Action::reduce_gradient:
      throw Error(ErrorCategory::state, "more than one rank is not in this version");
    case Action::gate:
      return step.gate();
    case Action::fetch_states:
      return step.fetch_states();
    case Action::offload_weights:
      return step.offload_weights();
    case Action::update_on_host:
      return step.update_on_host();
    case Action::update_on_device:
      return step.update_on_device();
    case Action::writeback_weights:
      return step.writeback_weights();
    case Action::writeback_states:
      return step.writeback_states();
  }
}

}  // namespace ballast::engine
