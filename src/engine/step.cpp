#include "src/engine/step.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "ballast/core/error.h"
#include "ballast/schedule/rank_sizes.h"

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
  void fetch_weights() { fetch(Role::weights_source, Role::weights, false); }
  /// States are read ahead of their update; the weights of a pass are wanted sooner.
  void fetch_states() { fetch(Role::states_source, Role::states, true); }
  void fetch_activation() { fetch(Role::input, Role::output, false); }
  void writeback_weights() { writeback(Role::weights_source, Role::weights); }
  void writeback_states() { writeback(Role::states_source, Role::states); }
  void writeback_activation() { writeback(Role::input, Role::output); }

  // upload, offload: host and device; enqueue
  void upload_batch() { upload(Role::batch_source, Role::batch); }
  void upload_weights() { upload(Role::weights_source, Role::weights); }
  void upload_activation() { upload(Role::input, Role::output); }
  void offload_weights() { offload(Role::weights_source, Role::weights); }
  void offload_activation() { offload(Role::input, Role::output); }
  void offload_gradient() { offload(Role::gradient_source, Role::gradient); }
  void offload_statistics() { offload(Role::statistics_source, Role::statistics); }
  void offload_losses() { offload(Role::losses_source, Role::losses); }

  // gather, reduce: between ranks
  /// Split weights come from the ranks that have a copy of them together; weights that a rank
  /// keeps, from all ranks that keep them too.
  void gather_weights() {
    if (has(Role::workspace)) return gather_weights_as_codes();
    auto& stream = *machine_.gather_stream;
    const std::uint32_t block = operation_.block;
    if (has(Role::weights_source)) {
      in_group().all_gather(stream, device(Role::weights_source, sizes().weights(block)),
                            device(Role::weights, sizes().whole_weights(block)));
    } else {
      const bool share = sizes().splits_weights(block);
      const DeviceBytes kept = device(Role::weights, sizes().weights(block));
      const Bytes part = sizes().weight_part(block);
      (share ? *machine_.gathering_share : *machine_.gathering)
          .all_gather(stream, kept.subview(place_at_home() * part, part), kept);
    }
    stream.synchronize();
  }

  /// This rank's share is decoded too: all ranks compute with the same weights.
  void gather_weights_as_codes() {
    auto& stream = *machine_.gather_stream;
    const std::uint32_t block = operation_.block;
    const Bytes share = sizes().weights(block);
    const Bytes coded = sizes().share_codes(block);
    const DeviceBytes codes = device(Role::workspace, sizes().whole_codes(block));
    const DeviceBytes whole = device(Role::weights, sizes().whole_weights(block));
    const std::uint32_t place = machine_.blueprint.rank % sizes().group();
    const DeviceBytes own = codes.subview(place * coded, coded);
    machine_.compute.encode_weights(stream, device(Role::weights_source, share), own);
    in_group().all_gather(stream, own, codes);
    for (std::uint32_t g = 0; g < sizes().group(); ++g) {
      machine_.compute.decode_weights(stream, codes.subview(g * coded, coded),
                                      whole.subview(g * share, share));
    }
    stream.synchronize();
  }

  /// The sum over ranks, or this rank's part of it, and the statistics of that part in any case: so
  /// they are the same in every stage.
  void reduce_gradient() {
    auto& stream = *machine_.reduce_stream;
    const Bytes part = sizes().gradient_part(operation_.block);
    const bool in_place = !has(Role::gradient_source);
    const schedule::BufferId packed =
        operation_.buffer(in_place ? Role::gradient : Role::gradient_source);
    const DeviceBytes whole =
        machine_.store.device(packed, sizes().whole_gradient(operation_.block));
    const schedule::BufferId arriving = operation_.buffer(Role::workspace);
    const DeviceBytes scratch =
        machine_.store.device(arriving, machine_.blueprint.schedule.buffers[arriving].bytes);
    const DeviceBytes sum =
        in_place ? whole.subview(part_number() * part, part) : device(Role::gradient, part);
    const DType type = machine_.blueprint.type;
    if (sizes().splits_states()) {
      machine_.reducing->reduce_scatter(stream, whole, sum, type, scratch);
    } else {
      machine_.reducing->all_reduce(stream, whole, type, scratch);
    }
    machine_.compute.measure_gradient(stream, sum, scratch, gradient_statistics());
    stream.synchronize();
  }

  // compute: enqueues
  void forward() {
    auto& stream = machine_.compute_lane.stream();
    const DeviceBytes out = device(Role::output, activation_bytes());
    if (operation_.block == 0) {
      machine_.compute.embedding_forward(stream, weights(), tokens(), out);
    } else {
      machine_.compute.layer_forward(stream, operation_.block, weights(),
                                     device(Role::input, activation_bytes()), out, kept());
    }
  }

  void backward() {
    auto& stream = machine_.compute_lane.stream();
    const DeviceBytes flow = device(Role::gradient_flow, activation_bytes());
    if (operation_.block == 0) {
      machine_.compute.embedding_backward(stream, tokens(), flow, accumulator());
    } else {
      machine_.compute.layer_backward(stream, operation_.block, weights(),
                                      device(Role::input, activation_bytes()), flow, accumulator(),
                                      kept());
    }
  }

  void evaluate_head() {
    auto& stream = machine_.compute_lane.stream();
    machine_.compute.head_forward(stream, weights(), tied_weights(),
                                  device(Role::input, activation_bytes()), targets(), loss());
  }

  void train_head() {
    auto& stream = machine_.compute_lane.stream();
    const auto scale = static_cast<float>(1.0 / static_cast<double>(tokens_in_step()));
    machine_.compute.head_train(stream, weights(), tied_weights(),
                                device(Role::input, activation_bytes()), targets(), scale,
                                device(Role::gradient_flow, activation_bytes()), accumulator(),
                                tied_accumulator(), loss());
  }

  void clear_gradient() {
    auto& stream = machine_.compute_lane.stream();
    machine_.compute.zero(stream, accumulator());
    if (!tied_accumulator().empty()) machine_.compute.zero(stream, tied_accumulator());
  }

  void pack_gradient() {
    auto& stream = machine_.compute_lane.stream();
    const DeviceBytes whole = device(Role::gradient, sizes().whole_gradient(operation_.block));
    const DeviceBytes packed = whole.subview(0, work().gradient_bytes);
    // What pads it to equal parts of all ranks counts as a gradient there.
    const DeviceBytes padding = whole.subview(packed.size(), whole.size() - packed.size());
    if (!padding.empty()) machine_.compute.zero(stream, view_as<float>(padding));
    machine_.compute.pack_gradient(stream, accumulator(), tied_accumulator(), packed,
                                   gradient_statistics());
  }

  // update
  /// Loss, global norm (blocks in order, in double) and what follows from it: the clip coefficient
  /// of DeepSpeed, norm' = (norm + 1e-6) / clip, coefficient = 1 / max(1, norm').
  void gate() {
    Findings all = findings();
    context_.result.loss = all.loss / static_cast<double>(tokens_in_step());
    if (!has(Role::statistics)) return;
    const double norm = std::sqrt(all.squares);
    context_.result.grad_norm = norm;
    context_.result.skipped = all.non_finite != 0 || !std::isfinite(norm);
    // Eager updates do not wait for this and are not clipped.
    if (machine_.blueprint.options.update == schedule::Update::eager) return;
    const double clip = machine_.options.gradient_clipping;
    const double excess = clip > 0.0 ? (norm + 1e-6) / clip : 0.0;
    context_.hyper.gradient_scale = excess > 1.0 ? static_cast<float>(1.0 / excess) : 1.0F;
  }

  void update_on_host() {
    if (!allowed()) return;
    const cpu_adam::Shard shard =
        make_shard(machine_.blueprint, operation_.block,
                   host(Role::weights, sizes().updated_weights(operation_.block)).data(),
                   host(Role::states, work().state_bytes).data(),
                   host(Role::gradient, sizes().updated_gradient(operation_.block)).data());
    machine_.updater.step(context_.hyper, shard);
  }

  void update_on_device() {
    if (!allowed()) return;
    auto& stream = *machine_.update_stream;
    const cpu_adam::Shard shard =
        make_shard(machine_.blueprint, operation_.block,
                   device(Role::weights, sizes().updated_weights(operation_.block)).raw(),
                   device(Role::states, work().state_bytes).raw(),
                   device(Role::gradient, sizes().updated_gradient(operation_.block)).raw());
    machine_.device_update.step(stream, context_.hyper, shard);
    stream.synchronize();
  }

 private:
  [[nodiscard]] const schedule::BlockWork& work() const {
    return machine_.blueprint.workload.blocks[operation_.block];
  }
  [[nodiscard]] Bytes activation_bytes() const {
    return machine_.blueprint.workload.activation_bytes;
  }
  [[nodiscard]] std::uint64_t tokens_in_step() const {
    return context_.micro_batches * machine_.blueprint.shape.tokens() *
           machine_.blueprint.workload.world;
  }
  [[nodiscard]] schedule::RankSizes sizes() const {
    return schedule::RankSizes(machine_.blueprint.workload);
  }
  /// `bytes` of the buffer in `role`, or this rank's part of so many.
  [[nodiscard]] HostBytes host(Role role, Bytes bytes) const {
    const schedule::Use use = operation_.use(role);
    const Bytes before = use.part ? place_in(role) * bytes : 0;
    return machine_.store.host(use.buffer, before + bytes).subspan(before);
  }
  [[nodiscard]] DeviceBytes device(Role role, Bytes bytes) const {
    const schedule::Use use = operation_.use(role);
    const Bytes before = use.part ? place_in(role) * bytes : 0;
    return machine_.store.device(use.buffer, before + bytes).subview(before, bytes);
  }
  /// Numbers of this rank's part: among all of a block, and among those of weights at home.
  [[nodiscard]] std::uint32_t part_number() const {
    return sizes().part_of(machine_.blueprint.rank);
  }
  [[nodiscard]] std::uint32_t place_at_home() const {
    return sizes().place_at_home(operation_.block, machine_.blueprint.rank);
  }
  [[nodiscard]] std::uint32_t place_in(Role role) const {
    const bool weights = role == Role::weights || role == Role::weights_source;
    return weights ? place_at_home() : part_number();
  }
  [[nodiscard]] comm::Communicator& in_group() const {
    return machine_.gathering_in_group ? *machine_.gathering_in_group : *machine_.gathering;
  }
  [[nodiscard]] bool has(Role role) const { return operation_.buffer(role) != schedule::kNoBuffer; }

  /// A layer's intermediates; empty where it keeps none.
  [[nodiscard]] DeviceBytes kept() const {
    if (!has(Role::intermediates)) return {};
    return device(Role::intermediates, machine_.blueprint.workload.intermediate_bytes);
  }
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
  /// Where the statistics of the block's gradient go; empty when nobody wants them.
  [[nodiscard]] DeviceView<model::GradientStats> gradient_statistics() const {
    if (!has(Role::statistics)) return {};
    return view_as<model::GradientStats>(device(Role::statistics, sizeof(model::GradientStats)));
  }
  [[nodiscard]] model::GradientStats statistics(schedule::BufferId buffer) const {
    model::GradientStats found;
    std::memcpy(&found, machine_.store.host(buffer, sizeof found).data(), sizeof found);
    return found;
  }

  /// What the gate judges by.
  struct Findings {
    double loss = 0.0;
    double squares = 0.0;
    std::uint64_t non_finite = 0;
  };

  /// Of this rank: its loss, then the statistics of each block's gradient.
  [[nodiscard]] std::vector<model::GradientStats> own_findings() const {
    const HostBytes bytes = host(Role::losses, machine_.blueprint.workload.losses_bytes);
    const auto* losses = reinterpret_cast<const double*>(bytes.data());
    double loss = 0.0;
    for (std::uint32_t m = 0; m < context_.micro_batches; ++m) loss += losses[m];
    std::vector<model::GradientStats> own = {{.sum_of_squares = loss}};
    for (const schedule::Use& use : operation_.uses) {
      if (use.role == Role::statistics) own.push_back(statistics(use.buffer));
    }
    return own;
  }

  /// Over all ranks: losses in rank order, squares block by block and in the order of parts.
  [[nodiscard]] Findings findings() const {
    const std::vector<model::GradientStats> own = own_findings();
    std::vector<model::GradientStats> all = own;
    const std::size_t world = machine_.blueprint.workload.world;
    if (world > 1) {
      all.resize(world * own.size());
      machine_.ranks->all_gather(std::as_bytes(std::span(own)),
                                 std::as_writable_bytes(std::span(all)));
    }
    Findings sums;
    for (std::size_t i = 0; i < own.size(); ++i) {
      for (std::uint32_t p = 0; p < world; ++p) {
        const std::size_t rank = i == 0 ? p : sizes().owner_of(p);
        const model::GradientStats& one = all[rank * own.size() + i];
        (i == 0 ? sums.loss : sums.squares) += one.sum_of_squares;
        sums.non_finite += one.non_finite;
      }
    }
    return sums;
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

  void fetch(Role from, Role to, bool ahead) {
    machine_.store.fetch(operation_.buffer(from), host(to, operation_.bytes), ahead);
  }
  void writeback(Role from, Role to) {
    machine_.store.writeback(operation_.buffer(to), host(from, operation_.bytes));
  }
  void upload(Role from, Role to) {
    const Bytes bytes = operation_.bytes;
    machine_.device.copy_to_device(machine_.upload_lane.stream(), device(to, bytes),
                                   host(from, bytes));
  }
  void offload(Role from, Role to) {
    const Bytes bytes = operation_.bytes;
    machine_.device.copy_to_host(machine_.offload_lane.stream(), host(to, bytes),
                                 device(from, bytes));
  }

  Machine& machine_;
  const Operation& operation_;
  StepContext& context_;
};

void tell(Step& step, schedule::Action action) {
  switch (action) {
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
      return step.gather_weights();
    case Action::reduce_gradient:
      return step.reduce_gradient();
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

QueuedLane& lane_of(Machine& machine, const Operation& operation) {
  switch (operation.lane) {
    case schedule::Lane::upload:
      return machine.upload_lane;
    case schedule::Lane::offload:
      return machine.offload_lane;
    default:
      return machine.compute_lane;
  }
}

}  // namespace

void start(Machine& machine, const Operation& operation, std::uint64_t run) {
  Step step(machine, operation, machine.context(run - operation.lag));
  tell(step, operation.action);
  if (schedule::is_queued(operation.lane)) lane_of(machine, operation).end_operation();
}

void finish(Machine& machine, const Operation& operation) {
  lane_of(machine, operation).await_operation();
}

}  // namespace ballast::engine
