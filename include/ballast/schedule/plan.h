#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/tier.h"
#include "ballast/core/units.h"
#include "ballast/schedule/workload.h"

namespace ballast::schedule {

/// A resource that starts operations one by one, in plan order, named after its pipeline stage.
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

/// How a lane runs its operations.
enum class Mode : std::uint8_t {
  one_at_a_time,  ///< the lane's thread performs each one synchronously
  streamed,       ///< enqueued on a device stream, which runs them in order
  submitted       ///< disk requests, which may run and end in any order
};

constexpr Mode mode_of(Lane lane) noexcept {
  switch (lane) {
    case Lane::compute:
    case Lane::upload:
    case Lane::offload:
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

/// Whether operations of the lane may be enqueued before their predecessors finish.
constexpr bool is_queued(Lane lane) noexcept {
  return mode_of(lane) != Mode::one_at_a_time;
}

/// The kind of an operation; the roles of its buffers are its arguments. plan.cpp has a table with
/// the name and the lane of each.
enum class Action : std::uint8_t {
  upload_batch,          ///< tokens, targets, positions of one micro-batch, host to device
  fetch_weights,         ///< NVMe to host staging
  upload_weights,        ///< host (home or staging) to device
  gather_weights,        ///< shards of all ranks to whole weights on the device
  decode_weights,        ///< weights that are codes in part to the training type, on the device
  normalize,             ///< the norm before tiles of a layer or of the head
  route,                 ///< the norm before experts, and the choice of experts for each row
  gather_routing,        ///< where the rows of each expert begin, of all ranks
  offload_routing,       ///< the same (of one rank if there is one), device to host
  forward,               ///< one block, one micro-batch
  evaluate_head,         ///< the head's loss without gradients
  train_head,            ///< the head forward and backward, all tiles of the vocabulary in one
  scan_head,             ///< one tile: the sums of its logits
  differentiate_head,    ///< one tile: its part of the gradients, logits computed again
  end_head,              ///< the loss and, in training, the gradient of the norm
  offload_activation,    ///< a block's input, device to host
  writeback_activation,  ///< the same, host staging to NVMe
  fetch_activation,      ///< the same, back to host staging
  upload_activation,     ///< the same, back to the device
  clear_gradient,        ///< prepares the accumulators of one block for the first micro-batch
  backward,              ///< one block, one micro-batch, recompute included
  pack_gradient,         ///< accumulators to the training type, with statistics
  reduce_gradient,       ///< packed gradients of all ranks to their sum, with its statistics
  offload_gradient,      ///< packed gradient, device to host
  writeback_gradient,    ///< the same, host staging to NVMe
  fetch_gradient,        ///< the same, back to host staging
  offload_statistics,    ///< gradient statistics of one block, device to host
  offload_losses,        ///< losses of all micro-batches, device to host
  gate,                  ///< loss and norm over all blocks, clip coefficient, skip decision
  fetch_states,          ///< optimizer states, NVMe to host staging
  upload_states,         ///< the same, host to device; only when states are filled
  offload_weights,       ///< weights, device to host
  offload_states,        ///< optimizer states, device to host; only when states are read
  update_on_host,        ///< the optimizer on a block in host memory
  update_on_device,      ///< the optimizer on a block in device memory
  writeback_weights,     ///< host staging to NVMe
  writeback_states,
  initialize,  ///< first values of weights, states, activations or gradients in host memory
  read         ///< a visitor looks at weights or states in host memory
};

std::string_view to_string(Action action) noexcept;
Lane lane_of(Action action) noexcept;
/// Whether its amount of work depends on the number of tokens in a step.
bool grows_with_batch(Action action) noexcept;

/// The kind of data in a buffer. Kind and tier make one line of the ledger.
enum class Kind : std::uint8_t {
  weights,        ///< weights where they live between uses
  states,         ///< remainder and moments where they live between updates
  gradients,      ///< packed gradients waiting for their update
  accumulators,   ///< fp32 gradient sums
  activations,    ///< inputs of blocks, and their gradients
  intermediates,  ///< kept by layers from the forward to the backward pass
  staging,        ///< buffers for weights and states in transit
  batch,          ///< tokens, targets, positions, losses, statistics
  workspace,      ///< intermediates of one block's kernels
  undo,           ///< weights and states as they were before a speculative update
  checkpoints     ///< NVMe that checkpoints keep, or will
};

std::string_view to_string(Kind kind) noexcept;

using BufferId = std::uint32_t;
using OpId = std::uint32_t;
inline constexpr BufferId kNoBuffer = std::numeric_limits<BufferId>::max();
inline constexpr OpId kNoOp = std::numeric_limits<OpId>::max();

/// One range of memory or disk for the life of the run. Edges order the uses of a buffer.
struct Buffer {
  std::string name;
  Tier tier = Tier::device;
  Kind kind = Kind::workspace;
  Bytes bytes = 0;
};

/// The part that a buffer plays in an operation.
enum class Role : std::uint8_t {
  weights,         ///< in the memory where the operation runs
  weights_source,  ///< source of copied or gathered weights
  output_weights,  ///< of a tile of the output matrix that is not in the head's first block
  batch,           ///< tokens, targets, positions of a micro-batch, device
  batch_source,    ///< the same, host
  input,           ///< activation read
  output,          ///< activation written
  gradient_flow,   ///< gradient of an activation
  intermediates,   ///< kept by a layer for its backward pass
  accumulator,     ///< fp32 gradient sums of the block
  /// fp32 gradient sums of a tile of the output matrix: of one that is tied, or is not in the
  /// head's first block.
  output_accumulator,
  /// What is known of the rows of a micro-batch between visits to tiles: the norm's result, and
  /// what the head adds.
  rows,
  routing,         ///< where the rows of each expert begin: of a micro-batch, or of all on the host
  routing_source,  ///< source of copied routing
  router_totals,   ///< sums over all routers for a micro-batch, for their losses
  /// fp32 sums over tiles: of the output of half a layer, or of the gradient of the norm's result.
  row_sums,
  gradient,         ///< packed gradient
  gradient_source,  ///< source of a copied or reduced gradient
  states,           ///< remainder and moments
  states_source,
  statistics,         ///< of the packed gradient, or of this rank's shard of it
  statistics_source,  ///< source of copied statistics
  losses,             ///< of all micro-batches
  pairs,          ///< losses of the reference by sequence, and weights of rows: of a micro-batch
  losses_source,  ///< source of copied losses
  verdict,        ///< the gate's decision; has no bytes, only orders operations
  undo_weights,   ///< weights before a speculative update
  undo_states,    ///< states before a speculative update
  workspace
};

/// An operation's use of a buffer.
struct Use {
  Role role = Role::workspace;
  BufferId buffer = kNoBuffer;
  bool writes = false;
  bool shard = false;  ///< uses only this rank's shard of the buffer; see RankSizes
};

/// The part of an update, or of a transfer for one, in speculation.
///
/// Logically the home of a speculating block holds its current values and an undo buffer those
/// before its last update. On NVMe the two are slots on the drives that change their roles.
enum class Speculation : std::uint8_t {
  none,
  /// Assumes that the gate will neither clip nor skip the step. Keeps the old values: an update in
  /// host memory copies them to the undo buffer, a writeback leaves them in the other slot.
  speculates,
  /// Undoes a speculative update and repeats it as the gate has decided. Reads the undo buffer.
  redoes
};

/// Rows that a router has sent to an expert: what an operation on it may depend on.
struct Condition {
  enum class Rows : std::uint8_t {
    not_needed,      ///< always true
    in_micro_batch,  ///< some of micro-batch `micro`
    in_step,         ///< some of any micro-batch
    in_step_before   ///< the same in the plan submitted before; false if that was no training step
  };
  Rows rows = Rows::not_needed;
  std::uint32_t micro = 0;
  bool any_rank = false;  ///< rows of any rank count, else those of this one

  [[nodiscard]] bool always() const { return rows == Rows::not_needed; }
  /// Whether it is known from the routings of the same plan.
  [[nodiscard]] bool reads_routing() const { return !always() && rows != Rows::in_step_before; }
  friend bool operator==(const Condition&, const Condition&) = default;
};

/// One operation of a step.
struct Operation {
  Action action = Action::forward;
  Lane lane = Lane::compute;
  std::uint8_t stream = 0;  ///< number among the lane's streams of the device
  std::uint32_t block = 0;
  std::uint32_t micro = 0;      ///< micro-batch, where it matters
  std::uint32_t sub_group = 0;  ///< of the block, for states and updates
  bool reference = false;       ///< a pass without adapters, see Workload::pairs_bytes
  /// 1 when it belongs to the previous run: the deferred updates of a gated step.
  std::uint32_t lag = 0;
  Speculation speculation = Speculation::none;
  /// When it has something to do. Otherwise it leaves its target as it is; the gradient and the
  /// statistics of an expert without rows become zeros.
  Condition condition;
  /// When its target already has what it would bring, so that there is nothing to do either.
  std::optional<Condition> unless = {};
  float likelihood = 1.0F;   ///< that it has something to do, for forecasts
  float token_share = 1.0F;  ///< of a micro-batch's tokens, those that it computes, for forecasts
  Bytes bytes = 0;           ///< moved by copies, transfers and collectives, on this rank
  /// First byte in the block's home, when the home is moved in pieces through a smaller buffer.
  Bytes offset = 0;
  double flops = 0.0;  ///< of matrix products
  Bytes traffic = 0;   ///< memory read and written outside of matrix products
  std::vector<Use> uses;
  /// Operations of the same plan that must be finished first; all smaller than this one's id.
  std::vector<OpId> after = {};

  /// The use in `role`; its buffer is kNoBuffer when there is none.
  [[nodiscard]] Use use(Role role) const;
  [[nodiscard]] BufferId buffer(Role role) const { return use(role).buffer; }
};

/// A queue that runs its operations in plan order: a device stream, or the thread of a lane with
/// Mode::one_at_a_time.
struct Stream {
  Lane lane = Lane::compute;
  std::uint8_t number = 0;  ///< among the lane's streams
  friend constexpr bool operator==(const Stream&, const Stream&) = default;
};

/// The stream on which `operation` runs; none for disk requests, which have no order.
constexpr std::optional<Stream> stream_of(const Operation& operation) noexcept {
  if (mode_of(operation.lane) == Mode::submitted) return std::nullopt;
  return Stream{operation.lane, operation.stream};
}

/// Whether a common stream orders two operations, given in plan order. All others need an edge.
constexpr bool ordered_by_stream(const Operation& before, const Operation& next) noexcept {
  const std::optional<Stream> stream = stream_of(before);
  return stream.has_value() && stream == stream_of(next);
}

/// The first and last uses of one buffer in a plan. seam() derives edges between runs from them.
struct Boundary {
  BufferId buffer = kNoBuffer;
  OpId first_writer = kNoOp;
  std::vector<OpId> first_readers;  ///< before the first write
  OpId last_writer = kNoOp;
  std::vector<OpId> last_readers;  ///< after the last write
};

/// One run's operations in an order that respects all edges. Each lane starts its own in it.
struct Plan {
  std::string name;  ///< "training step", "evaluation"
  std::vector<Operation> operations;
  std::vector<Boundary> boundaries;  ///< by buffer id, used buffers only
  std::uint32_t micro_batches = 0;
  OpId gate = kNoOp;             ///< its end makes the results known; kNoOp: no results
  bool applies_updates = false;  ///< begins with the updates that the previous run left
  bool leaves_updates = false;   ///< the next run must apply this one's updates

  /// Sum of bytes over the operations of `lane`.
  [[nodiscard]] Bytes bytes_on(Lane lane) const;
  [[nodiscard]] double flops() const;
};

/// For each operation of `next`, the operations of `before` that must finish first when the two run
/// back to back without a barrier. Edges that a common stream implies are left out.
std::vector<std::vector<OpId>> seam(const Plan& before, const Plan& next);

/// Where the states of one block live between uses.
struct BlockPlacement {
  Tier weights = Tier::device;
  Tier optimizer = Tier::device;
  /// The block's input between forward and backward, see Workload::places_input().
  Tier activations = Tier::device;
  /// Layers: intermediates stay on the device from forward to backward, else they are recomputed.
  /// The second half of a layer that is cut: its input does.
  /// The first block of a head of several tiles: their logits do, see in_one_pass().
  bool keeps_intermediates = false;
  /// With gated updates, for states below the device: the block is updated in the backward pass, in
  /// the expectation that the gate neither clips nor skips the step; see Schedule::rollback.
  bool speculates = false;
  /// The packed gradient until its update: host or nvme. That of a block with states on the device
  /// waits there.
  Tier gradients = Tier::host;
  friend bool operator==(const BlockPlacement&, const BlockPlacement&) = default;
};

struct Placement {
  std::vector<BlockPlacement> blocks;
};

/// Whether the head handles all tiles of the vocabulary in one operation, so that no logit is
/// computed twice: with one tile, or where the head's first block keeps its intermediates and the
/// whole weights of all tiles live on the device.
bool in_one_pass(const Workload& workload, const Placement& placement);

/// Whether a checkpoint is written while training continues: some weights or states are in host
/// memory. With weights or states on NVMe this takes a further extent for each of them, so a run
/// that keeps one checkpoint waits instead. `kept`: number of checkpoints that stay.
bool written_in_background(const Placement& placement, std::uint64_t kept);

enum class Order : std::uint8_t {
  layer_major,       ///< every micro-batch of a block before the next block
  micro_batch_major  ///< every block of a micro-batch before the next micro-batch
};

enum class Update : std::uint8_t {
  gated,  ///< after the global gradient norm is known: during the next step's forward pass
  eager   ///< as soon as the block's own gradient is complete: during the backward pass
};

/// Which experts a step updates.
enum class ExpertUpdates : std::uint8_t {
  all,     ///< every one: without rows its gradient is zero
  touched  ///< those to which a token of the step was sent; the others keep weights and moments
};

enum class Purpose : std::uint8_t {
  training,
  /// Losses alone: weights, one activation per micro-batch and a workspace. No optimizer states,
  /// gradients or inputs for a backward pass.
  evaluation
};

struct Options {
  Purpose purpose = Purpose::training;
  Order order = Order::layer_major;
  Update update = Update::gated;
  ExpertUpdates expert_updates = ExpertUpdates::all;
  /// Weights of experts move before their router has chosen: those of experts that had rows in the
  /// micro-batch or step before.
  bool prefetches_experts = false;
  std::uint32_t weight_slots = 2;        ///< device buffers for weights in transit, at least 1
  std::uint32_t gradient_slots = 2;      ///< device buffers for gradients in transit, at least 1
  std::uint32_t weight_staging = 3;      ///< host buffers for weights in transit, at least 1
  std::uint32_t state_staging = 3;       ///< host buffers for states from NVMe, at least 1
  std::uint32_t activation_staging = 3;  ///< host buffers for activations to NVMe, at least 1
  std::uint32_t gradient_staging = 3;    ///< host buffers for gradients to NVMe, at least 1
  /// Complete checkpoints that keep weights and states where they are on NVMe, at a time. A further
  /// one may be incomplete: see written_in_background().
  std::uint32_t kept_checkpoints = 0;
  friend bool operator==(const Options&, const Options&) = default;
};

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
  std::vector<Buffer> buffers;
  Plan first;       ///< a training step without pending updates
  Plan steady;      ///< a training step after another one
  Plan flush;       ///< only the pending updates; empty when eager
  Plan evaluation;  ///< comes after flush
  /// The pending updates, and those of speculating blocks undone and repeated; empty without them.
  Plan rollback;
  std::vector<BufferId> weight_home;  ///< per block: where weights live between steps
  /// Per block: where the trained ones, which come first, live if the frozen ones behind them have
  /// weight_home alone, else kNoBuffer.
  std::vector<BufferId> trained_home;
  /// [block][sub-group]: where states live between steps; empty for Purpose::evaluation.
  std::vector<std::vector<BufferId>> state_home;
  std::vector<BufferId> batch_host;         ///< per micro-batch, on the host
  BufferId workspace = kNoBuffer;           ///< device
  BufferId weight_staging = kNoBuffer;      ///< a host staging buffer for weights, if any
  BufferId state_staging = kNoBuffer;       ///< a host staging buffer for NVMe states, if any
  BufferId activation_staging = kNoBuffer;  ///< a host staging buffer for NVMe activations, if any
  BufferId gradient_staging = kNoBuffer;    ///< a host staging buffer for NVMe gradients, if any

  /// Sum of the buffers of `tier`.
  [[nodiscard]] Bytes bytes(Tier tier) const;
};

/// Builds the schedule. A pure function. Throws Error(config) when the placement or the options are
/// invalid (wrong number of blocks, too few slots, speculation with eager updates; for
/// Purpose::evaluation, a block that places more than its weights).
Schedule build(const Workload& workload, const Placement& placement, const Options& options);

/// The buffers of build() without its plans: the memory that a placement needs.
std::vector<Buffer> list_buffers(const Workload& workload, const Placement& placement,
                                 const Options& options);

/// The same bytes, each buffer in whole pages, as one buffer without a name for each tier and kind:
/// what a planner asks for thousands of times.
std::vector<Buffer> sum_buffers(const Workload& workload, const Placement& placement,
                                const Options& options);

/// A training step over the same buffers with fewer micro-batches (1 to the workload's): the last,
/// partial batch of an epoch. `applies_updates`: it follows another gated step.
Plan build_partial_step(const Workload& workload, const Placement& placement,
                        const Options& options, std::uint32_t micro_batches, bool applies_updates);

/// Homes of weights and states, by tier.
struct Homes {
  bool device = true;
  bool host = true;
  bool nvme = true;

  [[nodiscard]] constexpr bool has(Tier tier) const {
    return tier == Tier::device ? device : (tier == Tier::host ? host : nvme);
  }
};
inline constexpr Homes kHomesInMemory = {.nvme = false};
constexpr Homes homes_on(Tier tier) {
  return {tier == Tier::device, tier == Tier::host, tier == Tier::nvme};
}

/// The first plan of a training: the host operation `initialize` makes the values of every block's
/// weights and states, in pieces in ascending order, and copies move them to their homes. Writes
/// all NVMe homes, including those of activations and gradients.
Plan build_fill(const Workload& workload, const Placement& placement, const Options& options,
                Homes homes = {});

/// Copies weights and states of `count` blocks, starting with block `first`, to the host for the
/// operation `read`: a block's weights, then its states, each in pieces in ascending order.
Plan build_read(const Workload& workload, const Placement& placement, const Options& options,
                std::uint32_t first, std::uint32_t count, Homes homes = {});

/// Checks what must hold when `plans` are submitted one after the other: edges point backwards, and
/// any two operations that use a buffer, one of them writing, are ordered by edges, seams or a
/// common stream. Returns one line per breach.
std::vector<std::string> find_hazards(const Schedule& schedule,
                                      const std::vector<const Plan*>& plans);

/// "backward of layer 3, micro-batch 1": for messages and traces.
std::string describe(const Operation& operation, const Workload& workload);

}  // namespace ballast::schedule
