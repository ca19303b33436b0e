#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/attention_class.h"
#include "ballast/core/places.h"
#include "ballast/core/units.h"

namespace ballast::plan {

/// A resource that starts operations one by one, in plan order, named after its pipeline stage.
enum class Lane : std::uint8_t {
  compute,
  upload,
  offload,
  gather,
  reduce,
  update,
  fetch,
  writeback,
  peer  ///< between devices of a rank; only with several devices. Users read `pass`
};

inline constexpr std::size_t kLaneCount = 9;
inline constexpr std::array<Lane, kLaneCount> kLanes = {
    Lane::compute, Lane::upload, Lane::offload,   Lane::gather, Lane::reduce,
    Lane::update,  Lane::fetch,  Lane::writeback, Lane::peer};

std::string_view to_string(Lane lane) noexcept;

/// Returns the lanes of a rank with `devices` devices.
constexpr std::span<const Lane> lanes_of(std::uint32_t devices) noexcept {
  return std::span(kLanes).first(devices > 1 ? kLaneCount : kLaneCount - 1);
}

/// Returns whether each device of a rank has its own lane. Host and disks are shared.
constexpr bool is_per_device(Lane lane) noexcept {
  switch (lane) {
    case Lane::compute:
    case Lane::upload:
    case Lane::offload:
    case Lane::gather:
    case Lane::reduce:
    case Lane::peer:
      return true;
    case Lane::update:
    case Lane::fetch:
    case Lane::writeback:
      break;
  }
  return false;
}

/// Maximum number of devices of a rank.
inline constexpr std::uint32_t kMaxDevices = 8;

/// How a lane runs its operations.
enum class Mode : std::uint8_t {
  one_at_a_time,  ///< the lane's thread performs each operation synchronously
  streamed,       ///< enqueued on a device stream, which runs them in order
  submitted       ///< disk requests, which may run and end in any order
};

constexpr Mode mode_of(Lane lane) noexcept {
  switch (lane) {
    case Lane::compute:
    case Lane::upload:
    case Lane::offload:
    case Lane::peer:
      return Mode::streamed;
    case Lane::fetch:
    case Lane::writeback:
      return Mode::submitted;
    case Lane::gather:
    case Lane::reduce:
    case Lane::update:
      break;
  }
  return Mode::one_at_a_time;
}

/// Returns whether operations of the lane may be enqueued before their predecessors finish.
constexpr bool is_queued(Lane lane) noexcept {
  return mode_of(lane) != Mode::one_at_a_time;
}

// A plan does not depend on a model. The pass that an operation computes, or the value that it
// moves, is a number that only the plan's builder and its runner interpret.

/// Kind of an operation. plan.cpp has a table with the name and lane of each.
enum class Action : std::uint8_t {
  compute,           ///< a pass through a block for one micro-batch; see Operation::label
  decode,            ///< quantised weights to the training type, on the device
  clear,             ///< prepares the gradient sums of a block for the first micro-batch
  pack,              ///< gradient sums to the training type, with statistics
  upload,            ///< host to device
  offload,           ///< device to host
  fetch,             ///< NVMe to host staging
  writeback,         ///< host staging to NVMe
  gather,            ///< shards of several ranks to the whole, on the device
  reduce,            ///< packed gradients of all ranks to their sum, with its statistics
  gate,              ///< loss and norm over all blocks, clip coefficient, skip decision
  update,            ///< the optimizer on a block in host memory
  update_on_device,  ///< the optimizer on a block in device memory
  initialize,        ///< first values of data in host memory
  read,              ///< gives weights or states in host memory to a visitor
  select,            ///< rows of a table in host memory to a buffer there, one per token
  scatter,           ///< gradients of selected rows, added up, to the packed gradient of a table
  transfer,          ///< device to another device of the same rank. Users read `pass`
  keep,              ///< this rank's part of a value to a buffer of the same device
  exchange           ///< a pass between the ranks that share tensors' tiles
};
inline constexpr std::size_t kActionCount = 20;

std::string_view to_string(Action action) noexcept;
Lane lane_of(Action action) noexcept;

/// The data that an operation moves.
enum class Payload : std::uint8_t {
  none,
  weights,
  states,      ///< optimizer states of a sub-group
  gradient,    ///< packed
  statistics,  ///< statistics of a packed gradient
  value        ///< inputs, activations, losses: see Operation::label
};

std::string_view to_string(Payload payload) noexcept;

/// The ranks between which an operation exchanges data.
enum class RankGroup : std::uint8_t {
  all,
  weight_copy,  ///< ranks that share one copy of split weights (hpZ)
  same_share,   ///< ranks that keep the same share of split weights
  tensor        ///< ranks that share the tiles of each matrix
};

/// The measured curve that gives the rate of an operation's matrix products; see Rates.
enum class Speed : std::uint8_t { forward, backward, head };

/// The kind of data in a buffer. Kind and tier select a line of the ledger.
enum class Kind : std::uint8_t {
  weights,        ///< weights in their homes
  states,         ///< remainder and moments in their homes
  gradients,      ///< packed gradients waiting for their update
  accumulators,   ///< fp32 gradient sums
  activations,    ///< inputs of blocks, and their gradients
  intermediates,  ///< kept by layers from the forward to the backward pass
  staging,        ///< buffers for weights and states in transit
  batch,          ///< tokens, targets, sum rows, positions, losses, statistics
  workspace,      ///< intermediates of one block's kernels
  undo,           ///< weights and states as they were before a speculative update
  checkpoints     ///< NVMe extents that checkpoints keep, or will keep
};

std::string_view to_string(Kind kind) noexcept;

using BufferId = std::uint32_t;
using OpId = std::uint32_t;
inline constexpr BufferId kNoBuffer = std::numeric_limits<BufferId>::max();
inline constexpr OpId kNoOp = std::numeric_limits<OpId>::max();
inline constexpr std::uint32_t kNoLabel = std::numeric_limits<std::uint32_t>::max();

/// One range of memory or disk for the lifetime of the run. Edges order the uses of a buffer.
struct Buffer {
  std::string name;
  Tier tier = Tier::device;
  Kind kind = Kind::workspace;
  Bytes bytes = 0;
  /// Which of the rank's devices has it or, in host memory, is best near it. 0 on NVMe.
  std::uint8_t device = 0;
};

/// The use of a buffer in an operation. Compute operations have ports, which are numbers from
/// `first_port` on.
enum class Role : std::uint8_t {
  source,          ///< data to move, clear or pack
  target,          ///< destination of the data
  weights,         ///< weights of an update
  states,          ///< states of an update
  gradient,        ///< gradient of an update
  added_gradient,  ///< further sums of the same gradient, for pack
  statistics,      ///< statistics of the packed gradient, or of this rank's shard of it
  losses,          ///< losses of all micro-batches, for the gate
  decision,        ///< decision of the gate; has no bytes, only orders operations
  undo_weights,    ///< weights before a speculative update
  undo_states,     ///< states before a speculative update
  scratch,         ///< gradients received from other ranks, or weight codes
  tokens,          ///< a batch whose tokens have selected rows, for select, scatter and pack
  counts,          ///< row counts on the host, for conditions and the gate
  first_port
};

/// An operation's use of a buffer.
struct Use {
  Role role = Role::scratch;
  BufferId buffer = kNoBuffer;
  bool writes = false;
  bool shard = false;  ///< uses only this rank's shard of the buffer; see RankSizes
  /// Uses only the part of the buffer of this rank's tensor place: place p has the p-th part of the
  /// operation's bytes.
  bool part = false;
};

/// The part of an update, or of a transfer for one, in speculation.
///
/// Logically, the home of a speculating block has its current values, and an undo buffer has those
/// before its last update. On NVMe the two are slots on the drives that swap roles.
enum class Speculation : std::uint8_t {
  none,
  /// Assumes that the gate will neither clip nor skip the step. Keeps the old values: an update in
  /// host memory copies them to the undo buffer, a writeback leaves them in the other slot.
  speculates,
  /// Undoes a speculative update and repeats it as decided by the gate. Reads the undo buffer.
  redoes
};

/// A condition on the rows that the operation's block computes.
struct Condition {
  enum class Rows : std::uint8_t {
    not_needed,      ///< always true
    in_micro_batch,  ///< `micro` has rows
    in_step,         ///< some micro-batch has rows
    in_step_before  ///< like in_step, for the preceding plan; false if that was not a training step
  };
  Rows rows = Rows::not_needed;
  std::uint32_t micro = 0;
  bool any_rank = false;   ///< count rows of any rank, otherwise only this rank's
  bool any_model = false;  ///< count rows of the reference model, too

  [[nodiscard]] bool always() const { return rows == Rows::not_needed; }
  /// Returns whether it depends on routings of the same plan.
  [[nodiscard]] bool reads_routing() const { return !always() && rows != Rows::in_step_before; }
  friend bool operator==(const Condition&, const Condition&) = default;
};

/// One operation of a step.
struct Operation {
  Action action = Action::compute;
  Lane lane = Lane::compute;
  /// The rank's device on which it runs, or from which it copies; 0 if devices share the lane.
  std::uint8_t device = 0;
  Payload payload = Payload::none;
  RankGroup group = RankGroup::all;
  std::uint32_t block = 0;
  std::uint32_t micro = 0;      ///< micro-batch, if it belongs to one
  std::uint32_t sub_group = 0;  ///< sub-group of the block, for states and updates
  /// 1 if it belongs to the previous run: the deferred updates of a gated step.
  std::uint32_t lag = 0;
  /// Number of the pass that a compute operation runs, or of the value that is moved; else
  /// kNoLabel.
  std::uint32_t label = kNoLabel;
  Speculation speculation = Speculation::none;
  /// The operation does something only under this condition. Otherwise it leaves its target
  /// unchanged, except with `clears_when_idle`.
  Condition condition;
  /// The target already has the data if this condition holds, so that the operation does nothing.
  std::optional<Condition> unless = {};
  /// If the operation has nothing to do, its target becomes zeros: a gradient and its statistics.
  bool clears_when_idle = false;
  Speed speed = Speed::forward;
  float likelihood = 1.0F;   ///< probability that it has something to do, for forecasts
  float token_share = 1.0F;  ///< share of a micro-batch's tokens that it computes, for forecasts
  Bytes bytes = 0;           ///< bytes moved by copies, transfers and collectives on this rank
  /// First byte in the block's home, if the home is moved in pieces through a smaller buffer.
  Bytes offset = 0;
  double flops = 0.0;  ///< in matrix products
  // The parts of `flops` in the forward and backward passes of attention, for forecasts.
  double attention_flops = 0.0;
  double attention_backward_flops = 0.0;
  AttentionClass attention = AttentionClass::heads_128;
  Bytes traffic = 0;          ///< memory read and written outside matrix products
  Bytes adapter_traffic = 0;  ///< activations that products of adapters read and write
  std::vector<Use> uses;
  /// Operations of the same plan that must finish first; all ids are smaller than this one's.
  std::vector<OpId> after = {};

  /// Returns the use in `role`; its buffer is kNoBuffer if there is none.
  [[nodiscard]] Use use(Role role) const;
  [[nodiscard]] BufferId buffer(Role role) const { return use(role).buffer; }
  /// Returns whether its amount of work depends on the number of tokens in a step.
  [[nodiscard]] bool grows_with_batch() const {
    return action == Action::compute || action == Action::exchange || payload == Payload::value;
  }
};

/// Returns names of operations for messages: "backward of layer 3, micro-batch 1".
using Names = std::function<std::string(const Operation&)>;

/// A queue that runs its operations in plan order: a device stream, or the thread of a lane with
/// Mode::one_at_a_time.
struct StreamId {
  Lane lane = Lane::compute;
  std::uint8_t device = 0;
  friend constexpr bool operator==(const StreamId&, const StreamId&) = default;
};

/// Returns the stream on which `operation` runs; none for disk requests, which have no order.
constexpr std::optional<StreamId> stream_of(const Operation& operation) noexcept {
  if (mode_of(operation.lane) == Mode::submitted) return std::nullopt;
  return StreamId{operation.lane, operation.device};
}

/// Returns whether a common stream orders two operations, given in plan order. All others need an
/// edge.
constexpr bool ordered_by_stream(const Operation& before, const Operation& next) noexcept {
  const std::optional<StreamId> stream = stream_of(before);
  return stream.has_value() && stream == stream_of(next);
}

/// Returns whether the operations of the lane are collectives on device memory. Lanes with
/// Mode::one_at_a_time; on GPUs the executor enqueues them (ExecutorOptions::follow).
constexpr bool is_collective_lane(Lane lane) noexcept {
  return lane == Lane::gather || lane == Lane::reduce;
}

/// Returns whether the operations of the lane are enqueued, if those of collective lanes are
/// (`streams_collectives`).
constexpr bool is_queued(Lane lane, bool streams_collectives) noexcept {
  return is_queued(lane) || (streams_collectives && is_collective_lane(lane));
}

/// Returns whether the operations of the lane are on a stream, if those of collective lanes are.
constexpr bool is_on_stream(Lane lane, bool streams_collectives = true) noexcept {
  return mode_of(lane) == Mode::streamed || (streams_collectives && is_collective_lane(lane));
}

/// Returns whether it suffices that the stream of `next` waits for `before` instead of the host,
/// because one of them is a collective and both only use memory of their device. An offload writes
/// to host memory, which the host may read when it starts `next`.
constexpr bool stream_can_wait(const Operation& next, const Operation& before) noexcept {
  return before.device == next.device && before.lane != Lane::offload &&
         is_on_stream(before.lane) && is_on_stream(next.lane) &&
         (is_collective_lane(before.lane) || is_collective_lane(next.lane));
}

// Numbers of the lanes of all devices. The first ones are those of a rank with one device, in the
// order of Lane. They are followed by the pass lane of device 0 and by the lanes of each further
// device.

inline constexpr std::size_t kLanesPerDevice = 6;  ///< see is_per_device()

/// Returns the number of lanes of all devices together.
constexpr std::size_t lane_count(std::uint32_t devices) noexcept {
  return devices > 1 ? kLaneCount + (devices - 1) * kLanesPerDevice : kLaneCount - 1;
}
/// Returns the number of a lane of a device. Shared lanes have one number.
constexpr std::size_t lane_number(Lane lane, std::uint8_t device) noexcept {
  const auto kind = static_cast<std::size_t>(lane);
  if (device == 0 || !is_per_device(lane)) return kind;
  const std::size_t place = lane == Lane::peer ? kLanesPerDevice - 1 : kind;
  return kLaneCount + (std::size_t{device} - 1) * kLanesPerDevice + place;
}
constexpr std::size_t lane_number(const Operation& operation) noexcept {
  return lane_number(operation.lane, operation.device);
}
/// Returns the lane and the device of a number.
constexpr StreamId lane_at(std::size_t number) noexcept {
  if (number < kLaneCount) return {kLanes[number], 0};
  const std::size_t place = (number - kLaneCount) % kLanesPerDevice;
  const auto device = static_cast<std::uint8_t>(1 + (number - kLaneCount) / kLanesPerDevice);
  return {place + 1 == kLanesPerDevice ? Lane::peer : kLanes[place], device};
}

/// The first and last uses of one buffer in a plan, from which seam() derives edges between runs.
struct Boundary {
  BufferId buffer = kNoBuffer;
  OpId first_writer = kNoOp;
  std::vector<OpId> first_readers;  ///< before the first write
  OpId last_writer = kNoOp;
  std::vector<OpId> last_readers;  ///< after the last write
};

/// One run's operations in an order that respects all edges. Each lane starts its operations in
/// this order.
struct Plan {
  std::string name;  ///< "training step", "evaluation"
  std::vector<Operation> operations;
  std::vector<Boundary> boundaries;  ///< by buffer id, used buffers only
  std::uint32_t micro_batches = 0;
  OpId gate = kNoOp;  ///< when it ends, the results are known; kNoOp: no results
  /// The start of the loss for the first and for the last micro-batches that pass together; kNoOp:
  /// not in this plan. If all micro-batches pass together, the two are equal.
  OpId first_head = kNoOp;
  OpId last_head = kNoOp;
  bool applies_updates = false;  ///< begins with the updates that the previous run left
  bool leaves_updates = false;   ///< the next run must apply this run's updates

  /// Sum of bytes over the operations of each lane.
  [[nodiscard]] std::array<Bytes, kLaneCount> bytes_by_lane() const;
  [[nodiscard]] Bytes bytes_on(Lane lane) const {
    return bytes_by_lane()[static_cast<std::size_t>(lane)];
  }
  [[nodiscard]] double flops() const;
};

/// Returns, for each operation of `next`, the operations of `before` that must finish first if the
/// two run back to back without a barrier. Edges implied by a common stream are omitted.
std::vector<std::vector<OpId>> seam(const Plan& before, const Plan& next);

/// The schedule of a run: all of its buffers and the plans that use them.
///
/// A run of gated steps is: first, steady, steady, ..., flush. A steady step applies the updates of
/// the previous step during its forward pass; flush applies them without a step, before an
/// evaluation and at the end. Eager runs need only steady.
/// Purpose::evaluation needs only evaluation: all other plans are empty.
///
/// Speculating blocks are updated within their own step, as if it were neither clipped nor skipped.
/// A step whose gate decides otherwise is followed by rollback instead of the next step or flush,
/// then by first or an evaluation.
struct Schedule {
  std::uint32_t ranks = 1;               ///< with the same tensors
  std::uint32_t tensor = 1;              ///< ranks with other tiles of the tensors, per such rank
  std::uint32_t devices = 1;             ///< per rank
  std::uint32_t ranks_in_group = 1;      ///< ranks in RankGroup::weight_copy
  std::uint64_t micro_batch_tokens = 0;  ///< tokens of one micro-batch on one rank
  std::vector<Buffer> buffers;
  Plan first;       ///< a training step without pending updates
  Plan steady;      ///< a training step after another one
  Plan flush;       ///< only the pending updates; empty when eager
  Plan evaluation;  ///< runs after flush
  /// The pending updates, and the undone and repeated updates of speculating blocks; empty without
  /// these.
  Plan rollback;
  std::vector<BufferId> weight_home;  ///< per block: weights between steps
  /// Per block: the trained weights, which come first, if weight_home has only the frozen ones;
  /// else kNoBuffer.
  std::vector<BufferId> trained_home;
  /// [block][sub-group]: states between steps; empty for Purpose::evaluation.
  std::vector<std::vector<BufferId>> state_home;
  std::vector<BufferId> batch_host;         ///< per micro-batch, on the host
  std::vector<BufferId> workspace;          ///< by device
  BufferId weight_staging = kNoBuffer;      ///< a host staging buffer for weights, if any
  BufferId state_staging = kNoBuffer;       ///< a host staging buffer for NVMe states, if any
  BufferId activation_staging = kNoBuffer;  ///< a host staging buffer for NVMe activations, if any
  BufferId gradient_staging = kNoBuffer;    ///< a host staging buffer for NVMe gradients, if any

  /// Total size of the buffers of `tier`.
  [[nodiscard]] Bytes bytes(Tier tier) const;
};

}  // namespace ballast::plan
