#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/attention_class.h"
#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/model/architecture.h"
#include "ballast/model/kernels.h"

namespace ballast::model {

// A model's description of one training step and one evaluation: the values that its kernels read
// and write, block by block, for one micro-batch. It has no placement, no buffers and no devices;
// step/ turns it into a plan.

using BlockId = std::uint32_t;
using ClassId = std::uint32_t;
using ValueId = std::uint32_t;
using SumId = std::uint32_t;
using PassId = std::uint32_t;
using RecipeId = std::uint32_t;
inline constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();

/// The function of Compute that a pass runs.
enum class Kernel : std::uint8_t {
  embed,
  embed_backward,
  layer,  ///< a layer in one piece
  layer_backward,
  norm,  ///< the norm before tiles of a layer or of the head
  norm_backward,
  tile,  ///< a tile of a layer in tiles
  tile_backward,
  shared_expert,  ///< the expert of all tokens
  shared_expert_backward,
  router,  ///< the router: the norm before experts and the choice of experts
  router_backward,
  router_losses,  ///< losses of all routers, with the choices of the whole step
  expert,
  expert_backward,
  exchanged_expert,  ///< expert parallelism: one expert per rank, with an all-to-all of rows
  exchanged_expert_backward,
  result_norm,  ///< the norm of the experts' sum, added to the residual stream
  result_norm_backward,
  head_evaluate,       ///< the loss without gradients, vocabulary in one tile
  head_train,          ///< loss and gradients of all tiles of the vocabulary
  head_scan,           ///< one tile: accumulates the softmax sums of its logits
  head_differentiate,  ///< one tile: gradients, with recomputed logits
  head_end,            ///< the loss and, in training, the gradient of the norm
  // Tensor parallelism.
  head_merge,     ///< merges the softmax sums of all tiles
  sum_tiles,      ///< between ranks: adds what the tiles of all tensor places have computed
  share_row_sums  ///< between ranks: gathers the softmax sums of all tiles
};
inline constexpr std::size_t kKernelCount = 27;
/// Returns whether a kernel exchanges data between the tensor places. The engine performs it with a
/// collective, all others with model::Compute.
constexpr bool is_between_ranks(Kernel kernel) noexcept {
  return kernel == Kernel::sum_tiles || kernel == Kernel::share_row_sums;
}
/// Returns "layer backward" and the like, for messages and traces.
std::string_view to_string(Kernel kernel) noexcept;
/// Returns what an operation with this kernel does to its block: "forward", "backward", "loss".
std::string_view work_of(Kernel kernel) noexcept;

/// The name of a kernel's argument.
enum class Port : std::uint8_t {
  weights,
  output_weights,  ///< tiles of the output matrix in other blocks; one operand per tile, ascending
  batch,           ///< tokens, targets, sum rows and, if packed or in parts, positions
  input,
  output,
  activation_gradient,
  kept,            ///< intermediates of the forward pass
  kept_attention,  ///< the part of attention; see KernelSizes::attention
  normed,          ///< result of the norm, followed by the router's choices or the head's row sums
  /// fp32 sums over tiles: outputs, or gradients of the norm's result. With tensor parallelism what
  /// each tile of this place adds, tile by tile.
  partial_sums,
  /// Gradient of the norm's result, rounded: with tensor parallelism, and between experts and
  /// attention that read one norm.
  normed_gradient,
  /// The residual stream around experts, if attention writes their norm's result to `output` or
  /// their sum has a norm.
  residual,
  result_gradient,     ///< gradient of the experts' sum, before its norm
  row_sums,            ///< with tensor parallelism: softmax sums of the rows, by tile of this place
  all_row_sums,        ///< row_sums of all places, each place's in whole pages
  terms,               ///< with tensor parallelism: what is added between ranks
  received,            ///< memory for what other ranks send
  routing,             ///< on the device, written: where the rows of each expert begin
  routing_counts,      ///< on the host, read: the routing of all micro-batches and ranks
  all_routing_counts,  ///< on the host, read: routings of a step; one operand per router
  router_totals,       ///< sums over all routers
  losses,              ///< losses of the micro-batch
  pairs,               ///< reference losses and row weights of preference pairs
  keys_values,         ///< [N, keys | values] of a layer whose keys others read, written by it
  keys_values_gradient,   ///< fp32 sums of its readers' gradients
  layer_inputs,           ///< [N, layers x width], the projected part of LayerEmbeddingSpec
  layer_inputs_gradient,  ///< each layer writes its columns
  table_rows,             ///< [N, width], the rows of the layer's table that its tokens select
  gradient,               ///< fp32 gradient sum of the block
  output_gradient,      ///< fp32 gradient sum of a tile of the output matrix; one operand per tile
  table_rows_gradient,  ///< [N, width] fp32, written: the gradient of `table_rows`
  workspace
};
inline constexpr std::size_t kPortCount = 32;
std::string_view to_string(Port port) noexcept;

/// The way in which values of a class get their buffers.
enum class BufferRule : std::uint8_t {
  /// One buffer per life, and per micro-batch that passes a stop together with others. Lives that
  /// do not overlap share a buffer.
  own,
  in_turn,  ///< a ring, for values that the next stop consumes or that leave the device
  scratch,  ///< one buffer, used inside one pass
  step,     ///< one buffer for each micro-batch of the step
  report    ///< one entry per micro-batch in the report buffer, which is copied to the host
};

/// The line of the memory ledger that counts a value.
enum class MemoryKind : std::uint8_t { activations, intermediates, batch };

/// Values of one size that share buffers.
struct ValueClass {
  std::string name;  ///< name of its buffers: "rows between tiles"
  std::string word;  ///< word for messages: "activation"
  MemoryKind memory = MemoryKind::activations;
  Bytes bytes = 0;  ///< per micro-batch
  BufferRule buffers = BufferRule::own;
  /// The values are row counts per expert, copied to the host of every rank; see RowCount.
  bool counts = false;
  bool from_host = false;  ///< an input of the step: copied to the device before the passes
  /// The class whose buffers the values use in a schedule for evaluation alone, where nothing waits
  /// for a backward pass. kNone: this class.
  ClassId in_evaluation = kNone;
};

/// How a value gets from the forward to the backward pass.
enum class Waits : std::uint8_t {
  no,      ///< stays in its buffer until its last reader
  placed,  ///< moves to the tier that the placement gives to activations of `owner`
  /// Stays on the device if the placement keeps intermediates of `owner`. Otherwise `recipe`
  /// recomputes it, or it is an optional operand and its readers do without it.
  kept,
  /// Like `placed` if the placement keeps attention of `owner`. Otherwise it is an optional
  /// operand, and its readers do without it.
  kept_attention,
  again  ///< is recomputed by `recipe`
};

/// Device data of one micro-batch.
struct StepValue {
  std::string name;  ///< "input of layer 0"; also names its buffers, unless it shares them
  ClassId of = 0;
  BlockId owner = 0;
  Waits waits = Waits::no;
  RecipeId recipe = kNone;
  Bytes bytes = 0;  ///< 0: the size given by its class
};

/// fp32 sums of a gradient over the micro-batches of a step.
struct GradientSum {
  BlockId block = 0;
  Bytes bytes = 0;
  Bytes cleared = 0;   ///< bytes that Compute::clear_gradient() sets to zero
  bool clears = true;  ///< false: the first pass overwrites it (a tied output matrix)
  /// Whether it has rows only for the tokens of the step (BatchViews::sum_rows), so that packing
  /// reads the batches of all micro-batches.
  bool by_token = false;
};

enum class OperandKind : std::uint8_t {
  weights,
  rows,  ///< rows of a table that the tokens of the micro-batch select; written: their gradient
  value,
  gradient,
  workspace
};
enum class OperandAccess : std::uint8_t {
  reads,
  writes,  ///< a new life of the value begins
  updates  ///< read and written
};

/// Work of a pass, excluding transfers.
struct PassCost {
  double flops = 0.0;  ///< in matrix products
  Bytes traffic = 0;   ///< memory read and written outside matrix products
  // The parts of `flops` in the forward and backward passes of attention.
  double attention_flops = 0.0;
  double attention_backward_flops = 0.0;
  Bytes exchanged = 0;  ///< received from other ranks, assuming balanced routing of experts
  /// Activations that the products of adapters read and write. These products are so small that
  /// memory bounds them.
  Bytes adapter_traffic = 0;

  friend bool operator==(const PassCost&, const PassCost&) = default;
  PassCost& operator+=(const PassCost& more) {
    flops += more.flops;
    traffic += more.traffic;
    attention_flops += more.attention_flops;
    attention_backward_flops += more.attention_backward_flops;
    exchanged += more.exchanged;
    adapter_traffic += more.adapter_traffic;
    return *this;
  }
  PassCost& operator-=(const PassCost& less) {
    flops -= less.flops;
    traffic -= less.traffic;
    attention_flops -= less.attention_flops;
    attention_backward_flops -= less.attention_backward_flops;
    exchanged -= less.exchanged;
    adapter_traffic -= less.adapter_traffic;
    return *this;
  }
};

struct Operand {
  Port port = Port::workspace;
  OperandKind kind = OperandKind::workspace;
  std::uint32_t number = 0;  ///< a BlockId, ValueId or SumId, by kind
  OperandAccess access = OperandAccess::reads;
  bool optional = false;
  PassCost absent = {};  ///< added to the cost of the pass if an optional operand is not bound
  PassCost spared = {};  ///< subtracted from the cost of the pass if an optional operand is bound
};

/// The measured curve that gives the rate of a pass.
enum class CostCurve : std::uint8_t { forward, backward, head };
/// One kernel call for one micro-batch.
struct Pass {
  Kernel kernel = Kernel::layer;
  BlockId block = 0;
  std::uint8_t reference = 0;  ///< 0: the trained model, otherwise the number of a reference model
  /// Index of a vocabulary tile or, with tensor parallelism, of any tile among those of this place.
  /// For Kernel::sum_tiles the number of terms of each place.
  std::uint32_t number = 0;
  CostCurve curve = CostCurve::forward;
  PassCost cost;
  float token_share = 1.0F;  ///< share of the micro-batch's tokens, assuming balanced routing
  std::uint16_t shape = 0;   ///< equal for passes with the same kernels, for the warm-up
  /// The operands. Data are brought to the device in this order.
  std::vector<Operand> operands;
};

/// The variant of the head that a stop belongs to.
enum class HeadForm : std::uint8_t {
  any,
  one_pass,  ///< all tiles of the vocabulary in one kernel
  visits     ///< each tile in turn, twice
};

/// Passes that every micro-batch completes before the next stop begins.
struct Stop {
  std::vector<PassId> passes;
  std::vector<BlockId> finishes;  ///< blocks whose gradients are complete after it, in this order
  HeadForm form = HeadForm::any;
  bool backward = false;
};

/// Recomputes a value. Its passes have no optional operands: a pass that omits an output is a
/// separate pass.
struct Recipe {
  std::vector<Stop> stops;
};

/// Row count of an expert: starts[index + 1] - starts[index] rows are dispatched to its block,
/// where starts is the value `routing` or, in passes of the reference model, `reference_routing`.
struct RowCount {
  ValueId routing = 0;
  ValueId reference_routing = kNone;
  std::uint32_t index = 0;  ///< with StepBlock::per_rank: index for rank 0; rank r adds r
  double share = 1.0;       ///< share of the tokens, assuming balanced routing
};

struct StepBlock {
  std::string name;
  std::optional<RowCount> rows;
  bool per_rank = false;  ///< expert parallelism: each rank has a different expert in this block
  std::uint32_t layer = kNone;  ///< number of its layer; kNone: in the embedding or the head
  AttentionClass attention = AttentionClass::heads_128;  ///< class of its attention, if it has any
  /// For a table: bytes of the rows that the tokens of a micro-batch select. Its weights stay in
  /// host memory or on NVMe. 0: no table.
  Bytes selected = 0;
  Bytes row_gradients = 0;  ///< for a trained table: bytes of the gradient of these rows, in fp32
};

/// Condition for the head in one pass: the placement keeps intermediates of `keeper`, and all
/// weights of the blocks in `on_device` are on the device.
struct OnePassHead {
  BlockId keeper = 0;
  std::vector<BlockId> on_device;
};

struct StepProgram {
  std::vector<StepBlock> blocks;
  std::vector<ValueClass> classes;
  std::vector<StepValue> values;
  std::vector<GradientSum> sums;
  std::vector<Pass> passes;
  std::vector<Recipe> recipes;
  std::vector<Stop> training;           ///< forward, then backward
  std::vector<Stop> evaluation;         ///< forward
  BlockId first_layer = 0;              ///< after the blocks of the embedding
  BlockId first_differentiated = 0;     ///< the backward pass ends here
  BlockId head = 0;                     ///< its first block
  std::optional<OnePassHead> one_pass;  ///< empty: the head has only one form
  /// The backward pass reads the choices of all micro-batches (RouterLossSpan::step), so all
  /// micro-batches pass a block before the next block.
  bool counts_step = false;

  [[nodiscard]] bool is_layer(BlockId block) const { return block >= first_layer && block < head; }
  /// Bytes of a value of one micro-batch.
  [[nodiscard]] Bytes bytes_of(const StepValue& value) const {
    return value.bytes > 0 ? value.bytes : classes[value.of].bytes;
  }
};

/// Shape of a step: everything that its passes depend on in addition to the model.
struct StepShape {
  MicroBatchShape micro_batch;
  std::uint64_t micro_batches = 1;
  bool packed = false;  ///< several documents per sequence
  bool pairs = false;   ///< sequences 2 i and 2 i + 1 are a preference pair
  std::uint32_t ranks = 1;
  RouterLossSpan router_losses = RouterLossSpan::step;
  Bytes sum_scratch = 0;  ///< with tensor parallelism: device memory of a sum_tiles pass

  /// Whether a batch has the positions of its tokens, which layers read.
  [[nodiscard]] bool has_positions() const { return packed || micro_batch.slices > 1; }
};

/// Writes the passes of `model`. A pure function.
StepProgram write_program(const Architecture& model, DType type, const StepShape& shape,
                          const KernelSizes& sizes);

}  // namespace ballast::model
