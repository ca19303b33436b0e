#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/schedule/plan.h"

#include "src/schedule/emitter.h"
#include "src/schedule/layout.h"

namespace ballast::schedule {
namespace {

/// Takes buffers in turn.
class Ring {
 public:
  explicit Ring(const std::vector<BufferId>& buffers) : buffers_(buffers) {}
  BufferId next() { return buffers_[position_++ % buffers_.size()]; }

 private:
  const std::vector<BufferId>& buffers_;
  std::size_t position_ = 0;
};

/// The device buffers for weights in transit and what they hold: the least recently used one is
/// taken for the next block, a block that is still there is not copied again.
class WeightSlots {
 public:
  explicit WeightSlots(const std::vector<BufferId>& buffers) {
    for (const BufferId id : buffers) slots_.push_back({id, kEmpty});
  }

  /// The buffer of `block` and whether it must be filled first. Marks it most recently used.
  std::pair<BufferId, bool> take(std::uint32_t block) {
    auto found = std::find_if(slots_.begin(), slots_.end(),
                              [&](const Slot& slot) { return slot.block == block; });
    const bool fill = found == slots_.end();
    if (fill) found = slots_.begin();
    Slot slot = *found;
    slot.block = block;
    slots_.erase(found);
    slots_.push_back(slot);
    return {slot.buffer, fill};
  }

  /// Forgets everything: weights have changed.
  void invalidate() {
    for (Slot& slot : slots_) slot.block = kEmpty;
  }

 private:
  static constexpr std::uint32_t kEmpty = ~0U;
  struct Slot {
    BufferId buffer;
    std::uint32_t block;
  };
  std::vector<Slot> slots_;  ///< least recently used first
};

/// Tells a step operation by operation.
class StepBuilder {
 public:
  StepBuilder(std::string name, const Workload& workload, const Placement& placement,
              const Options& options, const Layout& layout, std::uint32_t micro_batches)
      : work_(workload),
        place_(placement),
        options_(options),
        layout_(layout),
        micro_batches_(micro_batches),
        emitter_(std::move(name), layout.buffers.size(), micro_batches),
        slots_(layout.weight_slots),
        weight_staging_(layout.weight_staging),
        state_staging_(layout.state_staging),
        gradient_slots_(layout.gradient_slots),
        activation_slots_(layout.activation_slots),
        inputs_(micro_batches, kNoBuffer) {}

  Plan training_step() {
    for (std::uint32_t m = 0; m < micro_batches_; ++m) upload_batch(m);
    if (options_.order == Order::layer_major) {
      layer_major_passes();
    } else {
      micro_batch_major_passes();
    }
    const OpId gate = offload_results_and_gate();
    slots_.invalidate();
    for (std::uint32_t b = 0; b < blocks(); ++b) update(b);
    Plan plan = emitter_.finish();
    plan.gate = gate;
    return plan;
  }

  Plan evaluation() {
    for (std::uint32_t m = 0; m < micro_batches_; ++m) upload_batch(m);
    if (options_.order == Order::layer_major) {
      for (std::uint32_t b = 0; b + 1 < blocks(); ++b) {
        for (std::uint32_t m = 0; m < micro_batches_; ++m) forward(b, m, false);
      }
      for (std::uint32_t m = 0; m < micro_batches_; ++m) head(Action::evaluate_head, m);
    } else {
      for (std::uint32_t m = 0; m < micro_batches_; ++m) {
        for (std::uint32_t b = 0; b + 1 < blocks(); ++b) forward(b, m, false);
        head(Action::evaluate_head, m);
      }
    }
    const OpId done = offload_results_and_gate();
    Plan plan = emitter_.finish();
    plan.gate = done;
    return plan;
  }

 private:
  [[nodiscard]] std::uint32_t blocks() const {
    return static_cast<std::uint32_t>(work_.blocks.size());
  }
  [[nodiscard]] std::uint32_t head_block() const { return blocks() - 1; }
  [[nodiscard]] const BlockWork& size(std::uint32_t block) const { return work_.blocks[block]; }
  [[nodiscard]] std::uint32_t lane_of_activations(std::uint32_t micro) const {
    return options_.order == Order::layer_major ? micro : 0;
  }

  OpId emit(Action action, Lane lane, std::uint32_t block, std::uint32_t micro, Bytes bytes,
            double flops, std::vector<Use> uses) {
    Operation operation;
    operation.action = action;
    operation.lane = lane;
    operation.block = block;
    operation.micro = micro;
    operation.bytes = bytes;
    operation.flops = flops;
    operation.uses = std::move(uses);
    return emitter_.emit(std::move(operation));
  }

  void layer_major_passes() {
    for (std::uint32_t b = 0; b + 1 < blocks(); ++b) {
      for (std::uint32_t m = 0; m < micro_batches_; ++m) forward(b, m, true);
    }
    clear_gradient(head_block());
    for (std::uint32_t m = 0; m < micro_batches_; ++m) head(Action::train_head, m);
    pack_gradient(head_block());
    for (std::uint32_t b = head_block(); b-- > 0;) {
      clear_gradient(b);
      for (std::uint32_t m = 0; m < micro_batches_; ++m) backward(b, m);
      pack_gradient(b);
    }
  }

  void micro_batch_major_passes() {
    for (std::uint32_t b = 0; b < blocks(); ++b) clear_gradient(b);
    for (std::uint32_t m = 0; m < micro_batches_; ++m) {
      const bool last = m + 1 == micro_batches_;
      for (std::uint32_t b = 0; b + 1 < blocks(); ++b) forward(b, m, true);
      head(Action::train_head, m);
      if (last) pack_gradient(head_block());
      for (std::uint32_t b = head_block(); b-- > 0;) {
        backward(b, m);
        if (last) pack_gradient(b);
      }
    }
  }

  void upload_batch(std::uint32_t m) {
    emit(Action::upload_batch, Lane::upload, 0, m, work_.batch_bytes, 0.0,
         {{Role::batch_source, layout_.batch_host[m], false},
          {Role::batch, layout_.batch_device[m], true}});
  }

  /// The device buffer that holds the weights of `block` now, fetched and uploaded if need be.
  BufferId weights_on_device(std::uint32_t block) {
    if (place_.blocks[block].weights == Tier::device) return layout_.weight_home[block];
    const auto [slot, fill] = slots_.take(block);
    if (!fill) return slot;
    BufferId source = layout_.weight_home[block];
    if (place_.blocks[block].weights == Tier::nvme) source = fetch_weights(block);
    upload_weights(block, source, slot);
    return slot;
  }

  BufferId fetch_weights(std::uint32_t block) {
    const BufferId staging = weight_staging_.next();
    emit(Action::fetch_weights, Lane::fetch, block, 0, size(block).weight_bytes, 0.0,
         {{Role::weights_source, layout_.weight_home[block], false},
          {Role::weights, staging, true}});
    return staging;
  }

  void upload_weights(std::uint32_t block, BufferId from, BufferId to) {
    emit(Action::upload_weights, Lane::upload, block, 0, size(block).weight_bytes, 0.0,
         {{Role::weights_source, from, false}, {Role::weights, to, true}});
  }

  void offload_weights(std::uint32_t block, BufferId from, BufferId to) {
    emit(Action::offload_weights, Lane::offload, block, 0, size(block).weight_bytes, 0.0,
         {{Role::weights_source, from, false}, {Role::weights, to, true}});
  }

  /// Where the forward pass puts the input of `block` (>= 1): its home, or a passing place.
  BufferId place_for_input(std::uint32_t block, std::uint32_t m) {
    if (place_.activations_on_host) return activation_slots_.next();
    return layout_.input_home[block][lane_of_activations(m)];
  }

  void forward(std::uint32_t block, std::uint32_t m, bool training) {
    const BufferId weights = weights_on_device(block);
    const BufferId out = place_for_input(block + 1, m);
    std::vector<Use> uses = {{Role::weights, weights, false}, {Role::output, out, true}};
    const BufferId in = inputs_[m];
    if (block == 0) {
      uses.push_back({Role::batch, layout_.batch_device[m], false});
    } else {
      uses.push_back({Role::input, in, false});
      uses.push_back({Role::workspace, layout_.workspace, true});
    }
    emit(Action::forward, Lane::compute, block, m, 0, size(block).forward_flops, std::move(uses));
    if (training && block > 0 && place_.activations_on_host) {
      emit(Action::offload_activation, Lane::offload, block, m, work_.activation_bytes, 0.0,
           {{Role::input, in, false},
            {Role::output, layout_.input_home[block][lane_of_activations(m)], true}});
    }
    inputs_[m] = out;
  }

  void head(Action action, std::uint32_t m) {
    const std::uint32_t block = head_block();
    std::vector<Use> uses = {{Role::weights, weights_on_device(block), false},
                             {Role::input, inputs_[m], false},
                             {Role::batch, layout_.batch_device[m], false},
                             {Role::results, layout_.results_device, true},
                             {Role::workspace, layout_.workspace, true}};
    if (work_.tied) uses.push_back({Role::tied_weights, weights_on_device(0), false});
    double flops = size(block).forward_flops;
    if (action == Action::train_head) {
      flops *= 3.0;
      uses.push_back({Role::gradient_flow, layout_.flow[lane_of_activations(m)], true});
      uses.push_back({Role::accumulator, layout_.accumulator[block], true});
      if (work_.tied) uses.push_back({Role::tied_accumulator, layout_.tied_accumulator, true});
    }
    emit(action, Lane::compute, block, m, 0, flops, std::move(uses));
  }

  void clear_gradient(std::uint32_t block) {
    std::vector<Use> uses = {{Role::accumulator, layout_.accumulator[block], true}};
    if (work_.tied && block == head_block()) {
      uses.push_back({Role::tied_accumulator, layout_.tied_accumulator, true});
    }
    emit(Action::clear_gradient, Lane::compute, block, 0, 0, 0.0, std::move(uses));
  }

  BufferId input_for_backward(std::uint32_t block, std::uint32_t m) {
    const BufferId home = layout_.input_home[block][lane_of_activations(m)];
    if (!place_.activations_on_host) return home;
    const BufferId slot = activation_slots_.next();
    emit(Action::upload_activation, Lane::upload, block, m, work_.activation_bytes, 0.0,
         {{Role::input, home, false}, {Role::output, slot, true}});
    return slot;
  }

  void backward(std::uint32_t block, std::uint32_t m) {
    std::vector<Use> uses = {{Role::gradient_flow, layout_.flow[lane_of_activations(m)], true},
                             {Role::accumulator, layout_.accumulator[block], true}};
    if (block == 0) {
      uses.push_back({Role::batch, layout_.batch_device[m], false});
    } else {
      uses.push_back({Role::weights, weights_on_device(block), false});
      uses.push_back({Role::input, input_for_backward(block, m), false});
      uses.push_back({Role::workspace, layout_.workspace, true});
    }
    emit(Action::backward, Lane::compute, block, m, 0, 3.0 * size(block).forward_flops,
         std::move(uses));
  }

  void pack_gradient(std::uint32_t block) {
    const bool on_device = place_.blocks[block].optimizer == Tier::device;
    const BufferId packed = on_device ? layout_.gradient[block] : gradient_slots_.next();
    std::vector<Use> uses = {{Role::accumulator, layout_.accumulator[block], false},
                             {Role::gradient, packed, true},
                             {Role::results, layout_.results_device, true}};
    if (work_.tied && block == 0) {
      uses.push_back({Role::tied_accumulator, layout_.tied_accumulator, false});
    }
    emit(Action::pack_gradient, Lane::compute, block, 0, 0, 0.0, std::move(uses));
    if (on_device) return;
    emit(Action::offload_gradient, Lane::offload, block, 0, size(block).gradient_bytes, 0.0,
         {{Role::gradient_source, packed, false}, {Role::gradient, layout_.gradient[block], true}});
  }

  OpId offload_results_and_gate() {
    emit(Action::offload_results, Lane::offload, 0, 0, work_.results_bytes, 0.0,
         {{Role::results, layout_.results_device, false},
          {Role::results_host, layout_.results_host, true}});
    return emit(Action::gate, Lane::update, 0, 0, 0, 0.0,
                {{Role::results_host, layout_.results_host, true}});
  }

  void update(std::uint32_t block) {
    if (place_.blocks[block].optimizer == Tier::device) {
      update_on_device(block);
    } else {
      update_on_host(block);
    }
  }

  void update_on_device(std::uint32_t block) {
    const Tier home = place_.blocks[block].weights;
    const BufferId weights = weights_on_device(block);
    emit(Action::update_on_device, Lane::compute, block, 0, 0, 0.0,
         {{Role::weights, weights, true},
          {Role::states, layout_.state_home[block], true},
          {Role::gradient, layout_.gradient[block], false},
          {Role::results_host, layout_.results_host, false}});
    if (home == Tier::host) offload_weights(block, weights, layout_.weight_home[block]);
    if (home == Tier::nvme) {
      const BufferId staging = weight_staging_.next();
      offload_weights(block, weights, staging);
      writeback(Action::writeback_weights, block, staging);
    }
  }

  void update_on_host(std::uint32_t block) {
    const BlockPlacement& home = place_.blocks[block];
    BufferId states = layout_.state_home[block];
    if (home.optimizer == Tier::nvme) {
      states = state_staging_.next();
      emit(Action::fetch_states, Lane::fetch, block, 0, size(block).state_bytes, 0.0,
           {{Role::states_source, layout_.state_home[block], false}, {Role::states, states, true}});
    }
    BufferId weights = layout_.weight_home[block];
    if (home.weights == Tier::nvme) weights = fetch_weights(block);
    if (home.weights == Tier::device) {
      weights = weight_staging_.next();
      offload_weights(block, layout_.weight_home[block], weights);
    }
    emit(Action::update_on_host, Lane::update, block, 0, 0, 0.0,
         {{Role::weights, weights, true},
          {Role::states, states, true},
          {Role::gradient, layout_.gradient[block], false},
          {Role::results_host, layout_.results_host, false}});
    if (home.weights == Tier::device) upload_weights(block, weights, layout_.weight_home[block]);
    if (home.weights == Tier::nvme) writeback(Action::writeback_weights, block, weights);
    if (home.optimizer == Tier::nvme) writeback(Action::writeback_states, block, states);
  }

  void writeback(Action action, std::uint32_t block, BufferId staging) {
    const bool weights = action == Action::writeback_weights;
    const BufferId home = weights ? layout_.weight_home[block] : layout_.state_home[block];
    const Bytes bytes = weights ? size(block).weight_bytes : size(block).state_bytes;
    emit(action, Lane::writeback, block, 0, bytes, 0.0,
         {{weights ? Role::weights_source : Role::states_source, staging, false},
          {weights ? Role::weights : Role::states, home, true}});
  }

  const Workload& work_;
  const Placement& place_;
  const Options& options_;
  const Layout& layout_;
  std::uint32_t micro_batches_;
  Emitter emitter_;
  WeightSlots slots_;
  Ring weight_staging_;
  Ring state_staging_;
  Ring gradient_slots_;
  Ring activation_slots_;
  std::vector<BufferId> inputs_;  ///< per micro-batch: the activation that the next block reads
};

void check_arguments(const Workload& workload, const Placement& placement, const Options& options) {
  const auto refuse = [](const std::string& message) {
    throw Error(ErrorCategory::config, "schedule: " + message);
  };
  if (workload.blocks.size() < 2) refuse("a model has at least an embedding and a head");
  if (placement.blocks.size() != workload.blocks.size()) {
    refuse(fmt::format("the placement has {} blocks, the model {}", placement.blocks.size(),
                       workload.blocks.size()));
  }
  if (workload.micro_batches == 0) refuse("a step has at least one micro-batch");
  if (workload.evaluation_micro_batches == 0 ||
      workload.evaluation_micro_batches > workload.micro_batches) {
    refuse("an evaluation has between one and a step's number of micro-batches");
  }
  if (options.weight_slots < 2) refuse("weights in transit need at least 2 device buffers");
  if (options.staging_buffers < 1) refuse("NVMe transfers need at least 1 staging buffer");
}

}  // namespace

Schedule build(const Workload& workload, const Placement& placement, const Options& options) {
  check_arguments(workload, placement, options);
  Layout layout = make_layout(workload, placement, options);
  Schedule schedule;
  schedule.training =
      StepBuilder("training step", workload, placement, options, layout, workload.micro_batches)
          .training_step();
  schedule.evaluation = StepBuilder("evaluation", workload, placement, options, layout,
                                    workload.evaluation_micro_batches)
                            .evaluation();
  if (!layout.weight_staging.empty()) schedule.weight_staging = layout.weight_staging.front();
  if (!layout.state_staging.empty()) schedule.state_staging = layout.state_staging.front();
  schedule.batch_host = std::move(layout.batch_host);
  schedule.workspace = layout.workspace;
  schedule.weight_home = std::move(layout.weight_home);
  schedule.state_home = std::move(layout.state_home);
  schedule.buffers = std::move(layout.buffers);
  return schedule;
}

}  // namespace ballast::schedule
