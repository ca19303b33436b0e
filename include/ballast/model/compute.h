#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/memory.h"
#include "ballast/core/units.h"
#include "ballast/device/device.h"
#include "ballast/model/architecture.h"
#include "ballast/model/cuda_libraries.h"
#include "ballast/model/kernels.h"
#include "ballast/model/step_program.h"

namespace ballast::model {

/// Position of a backward pass among the micro-batches of a step.
enum class Accumulation : std::uint8_t {
  first,  ///< the first after Compute::clear_gradient(): overwrites the gradients of matrices
  later   ///< adds to all gradients
};

/// Selects the elements that a layer with AdapterConfig::dropout drops. They are the same in the
/// forward and backward pass of a micro-batch, and differ between micro-batches.
struct Dropout {
  bool on = false;        ///< false in evaluations and in reference models
  std::uint64_t key = 0;  ///< derived from the seed, the step and the micro-batch
};

/// Moves rows between ranks (comm::Communicator::all_to_all): those that share the experts of a
/// block, or those that share sequences.
class AllToAll {
 public:
  virtual ~AllToAll() = default;
  AllToAll() = default;
  AllToAll(const AllToAll&) = delete;
  AllToAll& operator=(const AllToAll&) = delete;

  /// Enqueues an all-to-all on `stream`: sends part p of `input` to the rank with expert p of a
  /// block, or with slice p of the sequences, and receives part p of `output` from it. Sizes of the
  /// parts are in bytes. Kernels call it inside of work on `stream`, too.
  virtual void exchange(device::Stream& stream, ConstDeviceBytes input,
                        std::span<const Bytes> input_parts, DeviceBytes output,
                        std::span<const Bytes> output_parts) = 0;
};

/// This rank's place among the ranks that share its sequences.
struct SequenceSlice {
  std::uint32_t number = 0;      ///< below MicroBatchShape::slices
  AllToAll* exchange = nullptr;  ///< member p has slice p; null if there is one slice
};

/// Port::batch in its parts, each [N] or empty.
struct BatchViews {
  DeviceView<const std::int32_t> tokens;   ///< in [0, V)
  DeviceView<const std::int32_t> targets;  ///< below V; rows with a negative target have no loss
  /// Position of each token in its document: 0, or one more than the preceding token's. Attention
  /// stays inside a document. Empty: every sequence is one document.
  DeviceView<const std::int32_t> positions;
  /// Positions of all tokens of the sequences [sequences, whole length], for the mask of attention.
  /// Only given for packed documents of which this rank has a slice.
  DeviceView<const std::int32_t> whole_positions = {};
  /// For each token the number of its row in the gradient sum of its vocabulary tile. Equal tokens
  /// of a step have the same sum row, so that the sum has a row per distinct token
  /// (block_layout.h).
  DeviceView<const std::int32_t> sum_rows = {};

  /// Cuts a batch of N = `tokens` of a rank, which has one of `parts` parts of its sequences, into
  /// tokens, targets, sum rows and positions. Positions are there if documents are packed or if
  /// there are several parts.
  static BatchViews cut(ConstDeviceBytes batch, std::size_t tokens, std::size_t parts = 1) {
    const auto all = view_as<std::int32_t>(batch);
    const auto part = [&](std::size_t number, std::size_t size) {
      return all.size() < number * tokens + size ? DeviceView<const std::int32_t>()
                                                 : all.subview(number * tokens, size);
    };
    return {part(0, tokens), part(1, tokens), part(3, tokens),
            parts == 1 ? DeviceView<const std::int32_t>() : part(4, parts * tokens),
            part(2, tokens)};
  }
};

/// Scalars that the passes of a micro-batch need.
struct PassScalars {
  Accumulation accumulation = Accumulation::later;
  Dropout dropout;
  /// Gradient of the scaled loss with respect to the loss of one target or pair.
  float loss_gradient = 1.0F;
  /// Gradient with respect to the router losses. Equal for all passes of a step.
  float router_gradient = 0.0F;
  Preference preference;    ///< for preference pairs
  std::uint32_t shard = 0;  ///< index of this rank among the ranks of Port::routing_counts
  std::uint32_t ranks = 1;
};

/// Arguments of one pass. Views stay valid until the stream is synchronised.
struct PassArguments {
  /// Views by port; empty: not bound. The members below hold the other ports.
  std::array<DeviceBytes, kPortCount> views;
  BatchViews batch;
  /// Views of Port::output_weights and Port::output_gradient, by ascending tile.
  std::vector<DeviceBytes> output_weights, output_gradient;
  /// Routings of all ranks for the pass's micro-batch, in host memory; see RoutingCounts.
  std::span<const std::int32_t> routing_counts;
  /// For Kernel::router_losses: the routings of each router and micro-batch of the step.
  std::vector<std::span<const std::int32_t>> all_routing_counts;
  /// For Kernel::router: correction biases [experts] in host memory instead of those in the block's
  /// weights, which empty means. They stay valid until the stream is synchronised.
  std::span<const float> correction_biases;
  PassScalars scalars;
  AllToAll* exchange = nullptr;  ///< for Kernel::exchanged_expert and its backward pass
  SequenceSlice sequence_slice;  ///< for Kernel::layer and its backward pass

  [[nodiscard]] DeviceBytes& operator[](Port port) { return views[static_cast<std::size_t>(port)]; }
  [[nodiscard]] DeviceBytes operator[](Port port) const {
    return views[static_cast<std::size_t>(port)];
  }
};

/// The type of the numbers that passes write to a port.
enum class PortNumbers : std::uint8_t {
  none,         ///< nothing, or not only numbers of one type
  of_training,  ///< the training type
  f32,
  f64
};

constexpr PortNumbers numbers_of(Port port) {
  switch (port) {
    case Port::output:
    case Port::activation_gradient:
    case Port::keys_values:
    case Port::layer_inputs:
      return PortNumbers::of_training;
    case Port::gradient:
    case Port::output_gradient:
    case Port::table_rows_gradient:
    case Port::partial_sums:
    case Port::keys_values_gradient:
      return PortNumbers::f32;
    case Port::losses:
      return PortNumbers::f64;
    default:
      return PortNumbers::none;
  }
}

/// Calls `work(T())` with the type of the port's numbers, if they have one. `type`: the training
/// type. Returns whether it did.
template <class Work>
bool with_numbers(Port port, DType type, const Work& work) {
  switch (numbers_of(port)) {
    case PortNumbers::none:
      return false;
    case PortNumbers::of_training:
      with_training_type(type, work);
      return true;
    case PortNumbers::f32:
      work(float());
      return true;
    case PortNumbers::f64:
      work(double());
      return true;
  }
  return false;
}

/// Exact.
constexpr double to_double(double value) {
  return value;
}
template <class T>
constexpr double to_double(T value) {
  return to_float(value);
}

/// The sums that make up the gradient of a block.
struct GradientSums {
  DeviceView<const float> own;  ///< written by the backward passes of the block
  /// The head's gradient of a tied tile, added to the first elements; empty: none.
  DeviceView<const float> tied = {};
  /// For an embedding that is trained: all micro-batches that have added to its sum rows.
  std::span<const BatchViews> batches = {};
};

/// Forward and backward kernels of blocks on one device. Calls enqueue on `stream` and return. An
/// object has one workspace, so its calls must use one stream (unless a function accepts any).
/// Results depend only on inputs, shape and the number of compute threads.
class Compute {
 public:
  virtual ~Compute() = default;
  Compute() = default;
  Compute(const Compute&) = delete;
  Compute& operator=(const Compute&) = delete;

  [[nodiscard]] virtual const KernelSizes& sizes() const = 0;
  /// Bytes of one activation [N, H].
  [[nodiscard]] virtual Bytes activation_bytes() const = 0;
  /// Describes what else the bits of results depend on, in a few words: instruction sets, libraries
  /// and, where they matter, threads. Empty if they depend on the device alone.
  [[nodiscard]] virtual std::string arithmetic() const = 0;
  /// Sets the workspace, at least sizes().workspace bytes. Call it before the kernels.
  virtual void set_workspace(DeviceBytes workspace) = 0;

  /// Runs the kernel of `pass` on its operands. Throws Error(state) with the kernel and the port if
  /// the kernel cannot run on the block, or if an argument is too small or, unless it is optional,
  /// missing.
  ///
  /// Shapes, with N = shape.tokens(), H = hidden_size, V = vocab_size, E = elements of the block:
  /// input, output and activation_gradient [N, H] in the training type; weights [E] flat in the
  /// training type; gradient: flat fp32 sums of the trained elements; normed: sizes().rows bytes;
  /// partial_sums [N, H] fp32; kept: sizes().intermediates[block] bytes, page-aligned; losses:
  /// fp64, in nats. A token outside [0, V) or a target of V or more fails the stream with
  /// Error(data).
  ///
  /// embed: output = rows of the tokens (+ positions). A tile writes the rows of its tokens. The
  ///   last tile adds the positions to all rows.
  /// embed_backward: adds activation_gradient to the sum rows of the tokens, in token order. Its
  ///   gradient has the layout of TokenSums.
  /// layer: output = layer of input; they may not alias. kept: receives the intermediates that
  ///   layer_backward would otherwise recompute.
  /// layer_backward: turns the activation_gradient of the output into that of the input, in
  ///   place. kept: the intermediates that `layer` wrote for the same weights and input;
  ///   overwritten. Without them, recomputes the layer first, with the same bits.
  /// layer, layer_backward: kept_attention instead of kept: the part of the intermediates for which
  ///   attention and the map after it would be repeated, sizes().attention[block] bytes.
  /// norm: normed = norm of input, before the head or before half a layer in tiles. partial_sums
  ///   = input.
  /// tile: adds its part of the output to partial_sums and writes their rounded values to output.
  ///   Tiles run in ascending order.
  /// tile_backward: from the activation_gradient of the output, adds the gradient of the norm's
  ///   result to partial_sums; the half's last tile overwrites them. Tiles run in descending order.
  /// shared_expert, shared_expert_backward: like tile and tile_backward, for the expert of all
  ///   rows.
  /// norm_backward: the last backward pass of half a layer. Turns activation_gradient in place
  ///   into that of the input, using the tiles' partial_sums.
  /// router: like norm, and decides which experts compute which rows. Writes the choices next to
  ///   the norm's result, and to routing [experts + 1] int32, where the choices of each expert
  ///   begin in the list of all. Rows whose target is kPaddingTarget are sent to no expert and
  ///   count in no router loss; without a batch there is no padding. router_totals
  ///   [sizes().router_totals] fp64: sums over all routers; the first router overwrites them.
  ///   losses [2]: load-balancing loss and z-loss without their coefficients, written by the last
  ///   router.
  /// router_losses: replaces the numbers of choices in router_totals by those of the whole step in
  ///   all_routing_counts, then writes losses [2]: this micro-batch's terms of the losses of the
  ///   step.
  /// router_backward: like norm_backward.
  /// expert, expert_backward: like tile and tile_backward, for the rows in routing_counts. An
  ///   expert without rows does not read its weights. Adds to the gradient, which clear_gradient()
  ///   has set to zero.
  /// exchanged_expert, exchanged_expert_backward: like expert and expert_backward for a block
  ///   with one expert per rank. All ranks call it. Rows are dispatched to the rank of their expert
  ///   and combined afterwards. weights and gradient: those of this rank's expert.
  /// head_evaluate: losses [parts]: sums of the cross-entropy over equal parts of the rows,
  ///   usually one part, or one per sequence. With pairs, that port holds [sequences] fp64, the
  ///   reference model's loss of each sequence, and [N] fp32, the weight of each row. A reference
  ///   model writes the losses. The trained model reads them, writes the weights (derivative of the
  ///   pair's loss with respect to the row's loss) and writes one PairResult per pair to losses,
  ///   with zeros for a pair without targets. output_weights: the matrix in the tied block.
  /// head_train: the losses of head_evaluate for all vocabulary tiles. activation_gradient =
  ///   loss_gradient * that of the input. Adds to the gradients. Logits exist only for a chunk of
  ///   rows at a time. If pairs need several chunks, their logits are computed twice. kept: if
  ///   there are several tiles.
  ///
  /// The head tile by tile, with the bits of head_train: norm; head_scan of all tiles in ascending
  /// order; head_differentiate of all tiles in descending order; head_end. Pass::number is the
  /// tile.
  /// head_scan: adds the tile to the sums in normed. With losses or pairs (for the last tile, if
  ///   they are needed before the end): also writes those of head_evaluate.
  /// head_differentiate: adds the tile's part to partial_sums, which the last tile overwrites,
  ///   and to the tile's gradient (output_gradient if the matrix is tied). Either may be missing:
  ///   they may be computed by separate passes.
  /// head_end: writes the losses. With activation_gradient, also writes the gradient of the
  ///   input, from partial_sums.
  ///
  /// With T > 1 tensor places (Architecture::split), of k tiles each, the model is that of one
  /// place (at_tensor_place()). Pass::number is the index of any tile among those of the place.
  /// embed: output = -0.0 for tokens in no tile of the place. The place with the last tile adds
  ///   the positions.
  /// norm: leaves partial_sums.
  /// tile, tile_backward, head_differentiate: overwrite slice Pass::number of partial_sums [k, N,
  ///   H] and round nothing.
  /// norm_backward, head_end: read normed_gradient [N, H] in the training type, the rounded sum
  ///   of the slices of all places, instead of partial_sums.
  /// head_scan: writes slice Pass::number of row_sums [k, N], in elements of kRowSumBytes.
  /// head_merge: merges all_row_sums, the row_sums of all places in order, each in whole pages,
  ///   into the sums in normed.
  /// sum_tiles, share_row_sums: Error(state), because they need other ranks.
  virtual void run(device::Stream& stream, const Pass& pass, const PassArguments& arguments) = 0;

  /// Prepares the accumulators of `block` for a step, which begins with Accumulation::first. Sets
  /// them to zero, except the matrices of layers and the output matrix, whose first product
  /// overwrites them. The tied gradient needs no preparation.
  virtual void clear_gradient(device::Stream& stream, std::size_t block,
                              DeviceView<float> gradient) = 0;
  /// Sets all values to zero.
  virtual void zero(device::Stream& stream, DeviceView<float> gradient) = 0;
  /// packed = the gradient of `block`, rounded to the training type (nearest even). Writes the
  /// statistics of the packed values, unless `stats` is empty.
  virtual void pack_gradient(device::Stream& stream, std::size_t block, const GradientSums& sums,
                             DeviceBytes packed, DeviceView<GradientStats> stats) = 0;
  /// Writes the statistics of packed values (training type), bit-identical to pack_gradient()'s.
  /// Works on any stream, because it uses `scratch` (device memory, one GradientStats per
  /// kStatsChunk values) instead of the workspace.
  virtual void measure_gradient(device::Stream& stream, ConstDeviceBytes packed,
                                DeviceBytes scratch, DeviceView<GradientStats> stats) = 0;

  /// Encodes `weights` (training type, a multiple of WeightCodes::kBlock elements) into `codes`
  /// (WeightCodes::bytes_of the elements). Works on any stream, without the workspace.
  virtual void quantize_weights(device::Stream& stream, ConstDeviceBytes weights,
                                DeviceBytes codes) = 0;
  /// Decodes `codes` into `weights`, rounded to the training type. Works on any stream, without the
  /// workspace.
  virtual void dequantize_weights(device::Stream& stream, ConstDeviceBytes codes,
                                  DeviceBytes weights) = 0;
  /// Dequantises a block of a quantised base from `stored` (plain elements, then BlockCodes) to
  /// `weights` (all elements of the block, training type). Padding between tensors stays unchanged.
  virtual void decode_block(device::Stream& stream, std::size_t block, ConstDeviceBytes stored,
                            DeviceBytes weights) = 0;
};

/// Choices between kernels of the CUDA device. The host device ignores them.
struct KernelOptions {
  KernelSet set = KernelSet::best;
  GpuChecks checks = GpuChecks::off;
  /// Own with KernelSet::plain.
  AttentionBackend attention = AttentionBackend::best;
  /// Keeps the fastest timed algorithm of each product. Null: the first that the library's
  /// heuristic proposes.
  std::shared_ptr<ProductChoices> products;
};

/// Makes the kernels for `device`; its kind selects the implementation. `type`: type of weights and
/// activations; sums are fp32. Throws Error(device) if there are no kernels for the device's kind.
std::unique_ptr<Compute> make_compute(device::Device& device, const Architecture& model, DType type,
                                      MicroBatchShape shape, const KernelOptions& options = {});

/// Returns Compute::sizes() for a kind of device without such a device. `compute_threads` as in
/// device::DeviceOptions. Throws like make_compute().
KernelSizes kernel_memory(const Architecture& model, DType type, MicroBatchShape shape,
                          std::string_view device_kind, int compute_threads = 0);

/// Names the instruction set and the library of the host device's kernels with `threads` threads.
std::string host_kernels(int threads);

/// Measures the best matrix-multiply rate of this machine in `type`, in FLOP/s: the fastest of a
/// few square products on the device, during about `seconds`. Utilisation is relative to it. `set`:
/// the kernels of the CUDA device.
double measure_gemm_peak(device::Device& device, DType type, double seconds = 0.5,
                         KernelSet set = KernelSet::best);

/// Writes the initial fp32 values of elements [first, first + out.size()) of `tensor`. A value
/// depends only on the seed, the tensor's name and the element's index in the whole tensor. Throws
/// Error(state) for Init::row_norms.
void initialize(const TensorSpec& tensor, std::uint64_t seed, Elems first, std::span<float> out);

}  // namespace ballast::model
