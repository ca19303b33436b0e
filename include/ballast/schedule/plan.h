#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/tier.h"
#include "ballast/core/units.h"

namespace ballast::schedule {

/// A resource that runs one operation at a time, in plan order. Each carries its stage's name.
enum class Lane : std::uint8_t {
  compute,
  upload,
  offload,
  gather,
  reduce,
  update,
  fetch,
  writeback
};

inline constexpr std::size_t kLaneCount = 8;
inline constexpr std::array<Lane, kLaneCount> kLanes = {
    Lane::compute, Lane::upload, Lane::offload, Lane::gather,
    Lane::reduce,  Lane::update, Lane::fetch,   Lane::writeback};

std::string_view to_string(Lane lane) noexcept;

/// What an operation does. The lane says where; the roles of its buffers say with what.
enum class Action : std::uint8_t {
  upload_batch,        ///< tokens and targets of one micro-batch, host to device
  fetch_weights,       ///< NVMe to host staging
  upload_weights,      ///< host (home or staging) to device
  forward,             ///< one block, one micro-batch
  evaluate_head,       ///< the last block's loss without gradients
  train_head,          ///< the last block forward and backward in one
  offload_activation,  ///< a block's input, device to host
  upload_activation,   ///< the same, back
  clear_gradient,      ///< accumulators of one block to zero
  backward,            ///< one block, one micro-batch, recompute included
  pack_gradient,       ///< accumulators to the training type, with statistics
  offload_gradient,    ///< packed gradient, device to host
  offload_results,     ///< losses and gradient statistics, device to host
  gate,                ///< norm over all blocks, clip coefficient, skip decision
  fetch_states,        ///< optimizer states, NVMe to host staging
  offload_weights,     ///< weights, device to host
  update_on_host,      ///< Adam on a block in host memory
  update_on_device,    ///< Adam on a block in device memory
  writeback_weights,   ///< host staging to NVMe
  writeback_states
};

std::string_view to_string(Action action) noexcept;

/// What a buffer holds; with the tier, a line of the ledger.
enum class Kind : std::uint8_t {
  weights,       ///< weights where they live between uses
  states,        ///< remainder and moments where they live between updates
  gradients,     ///< packed gradients waiting for their update
  accumulators,  ///< fp32 gradient sums
  activations,   ///< inputs of blocks, and their gradients
  staging,       ///< passing places for weights and states
  batch,         ///< tokens, targets, losses, statistics
  workspace      ///< intermediates of one block's kernels
};

std::string_view to_string(Kind kind) noexcept;

using BufferId = std::uint32_t;
using OpId = std::uint32_t;
inline constexpr BufferId kNoBuffer = std::numeric_limits<BufferId>::max();
inline constexpr OpId kNoOp = std::numeric_limits<OpId>::max();

/// One range of memory or disk for the life of the run. Buffers with overlapping use in time are
/// different buffers; one that is reused is ordered by edges.
struct Buffer {
  std::string name;
  Tier tier = Tier::device;
  Kind kind = Kind::workspace;
  Bytes bytes = 0;
};

/// What a buffer is to an operation.
enum class Role : std::uint8_t {
  weights,           ///< on the side where the operation works
  weights_source,    ///< what weights are copied from
  tied_weights,      ///< block 0's weights, for the head
  batch,             ///< tokens and targets of a micro-batch, device
  batch_source,      ///< the same, host
  input,             ///< activation read
  output,            ///< activation written
  gradient_flow,     ///< gradient of an activation
  accumulator,       ///< fp32 gradient sums of the block
  tied_accumulator,  ///< fp32 gradient sums of the tied matrix from the head
  gradient,          ///< packed gradient
  gradient_source,   ///< what it is copied from
  states,            ///< remainder and moments
  states_source,
  results,       ///< losses and statistics, device
  results_host,  ///< the same, host
  workspace
};

/// An operation's use of a buffer.
struct Use {
  Role role = Role::workspace;
  BufferId buffer = kNoBuffer;
  bool writes = false;
};

/// One operation of a step.
struct Operation {
  Action action = Action::forward;
  Lane lane = Lane::compute;
  std::uint32_t block = 0;
  std::uint32_t micro = 0;  ///< micro-batch, where it matters
  Bytes bytes = 0;          ///< moved by copies and transfers
  double flops = 0.0;       ///< of matrix products
  std::vector<Use> uses;
  /// Operations of the same step that must be finished first; all smaller than this one's id.
  std::vector<OpId> after;
  /// Operations of the previous run of the same plan that must be finished first.
  std::vector<OpId> after_previous;

  /// The buffer in `role`, kNoBuffer when there is none.
  [[nodiscard]] BufferId buffer(Role role) const;
};

/// A step as data. `operations` is in an order that respects all edges; each lane runs its
/// operations in that order.
struct Plan {
  std::string name;  ///< "training step", "evaluation"
  std::vector<Operation> operations;
  std::uint32_t micro_batches = 0;
  OpId gate = kNoOp;  ///< results of the step are known when this one is done

  /// Sum of bytes over the operations of `lane`.
  [[nodiscard]] Bytes bytes_on(Lane lane) const;
  [[nodiscard]] double flops() const;
};

/// Which blocks there are and how large everything about them is.
struct BlockWork {
  std::string name;
  Bytes weight_bytes = 0;       ///< in the training type
  Bytes accumulator_bytes = 0;  ///< fp32
  Bytes gradient_bytes = 0;     ///< packed
  Bytes state_bytes = 0;        ///< remainder and moments
  double forward_flops = 0.0;   ///< per micro-batch
};

/// A model and a batch, as the schedule sees them: sizes only.
struct Workload {
  std::vector<BlockWork> blocks;  ///< embedding, layers, head
  bool tied = false;              ///< the head also reads block 0's weights
  Bytes tied_accumulator_bytes = 0;
  Bytes activation_bytes = 0;  ///< of one micro-batch between two blocks
  Bytes batch_bytes = 0;       ///< tokens and targets of one micro-batch
  Bytes results_bytes = 0;     ///< losses of all micro-batches and statistics of all blocks
  Bytes workspace_bytes = 0;
  std::uint32_t micro_batches = 1;             ///< per training step
  std::uint32_t evaluation_micro_batches = 1;  ///< per evaluation plan, at most micro_batches
};

/// Where the states of one block live between uses.
struct BlockPlacement {
  Tier weights = Tier::device;
  Tier optimizer = Tier::device;
  friend bool operator==(const BlockPlacement&, const BlockPlacement&) = default;
};

struct Placement {
  std::vector<BlockPlacement> blocks;
  bool activations_on_host = false;
};

enum class Order : std::uint8_t {
  layer_major,       ///< every micro-batch of a block before the next block
  micro_batch_major  ///< every block of a micro-batch before the next micro-batch
};

struct Options {
  Order order = Order::layer_major;
  std::uint32_t weight_slots = 2;     ///< device buffers for weights in transit, at least 2
  std::uint32_t staging_buffers = 3;  ///< host buffers for NVMe transfers per kind, at least 1
};

/// The whole schedule of a run: every buffer it will ever use, and its plans over them.
struct Schedule {
  std::vector<Buffer> buffers;
  Plan training;
  Plan evaluation;
  std::vector<BufferId> weight_home;    ///< per block: where weights live between steps
  std::vector<BufferId> state_home;     ///< per block: where states live between steps
  std::vector<BufferId> batch_host;     ///< per micro-batch: tokens and targets on the host
  BufferId workspace = kNoBuffer;       ///< device
  BufferId weight_staging = kNoBuffer;  ///< a host passing place for NVMe weights, if any
  BufferId state_staging = kNoBuffer;   ///< a host passing place for NVMe states, if any

  /// Sum of the buffers of `tier`.
  [[nodiscard]] Bytes bytes(Tier tier) const;
};

/// Builds the schedule. A pure function: no clock, no hardware. Throws Error(config) when the
/// placement or the options make no sense (wrong number of blocks, too few slots).
Schedule build(const Workload& workload, const Placement& placement, const Options& options);

/// Checks what must hold of any plan: edges point backwards, and any two operations that use a
/// buffer, one of them writing, are ordered by edges or by their common lane, within a step and
/// across two runs of the plan. Returns one line per breach.
std::vector<std::string> find_hazards(const Schedule& schedule, const Plan& plan);

/// "backward of layer 3, micro-batch 1": for messages and traces.
std::string describe(const Operation& operation, const Workload& workload);

}  // namespace ballast::schedule
