#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "ballast/core/dtype.h"
#include "ballast/core/gradient_stats.h"
#include "ballast/core/view.h"
#include "ballast/device/device.h"
#include "ballast/model/architecture.h"
#include "ballast/model/attention_backend.h"
#include "ballast/model/kernel_sizes.h"
#include "ballast/model/pass_arguments.h"
#include "ballast/model/product_choices.h"
#include "ballast/model/step_program.h"

namespace ballast::model {

/// Forward and backward of blocks on one device. Calls enqueue on `stream` and return. One object
/// has one workspace, so its calls go to one stream (unless a function says that it works on any).
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
  /// Describes on what the bits of results depend besides the inputs, in a few words: instruction
  /// sets, libraries and, where they matter, threads. Empty: on the device alone.
  [[nodiscard]] virtual std::string arithmetic() const = 0;
  /// Sets the workspace, at least sizes().workspace bytes. Call it before the kernels.
  virtual void set_workspace(DeviceBytes workspace) = 0;

  /// Runs the kernel of `pass` on the operands that it lists. Throws Error(state), which names the
  /// kernel and the port, if the block is not one of the kernel's, or if an argument is too small
  /// or, unless it is optional, missing.
  ///
  /// Shapes, with N = shape.tokens(), H = hidden_size, V = vocab_size, E = elements of the block:
  /// input, output and activation_gradient [N, H] in the training type; weights [E] flat in the
  /// training type; gradient: flat fp32 sums of the trained elements; normed: sizes().rows bytes;
  /// partial_sums [N, H] fp32; kept: sizes().intermediates[block] bytes, page-aligned; losses:
  /// fp64, in nats. A token outside of [0, V) or a target from V on fails the stream with
  /// Error(data).
  ///
  /// embed: output = rows of the tokens (+ positions). A tile writes the rows of its tokens; the
  ///   last one adds the positions to all rows.
  /// embed_backward: adds activation_gradient to the rows of the tokens, in token order.
  /// layer: output = layer of input, which may not alias it. kept: intermediates that
  ///   layer_backward would otherwise recompute.
  /// layer_backward: turns activation_gradient, that of the output, in place into that of the
  ///   input. kept: as `layer` with the same weights and input has left it; it is overwritten.
  ///   Without it: recomputes the layer first, with the same bits.
  /// norm: normed = the norm's result, of the head or of half a layer in tiles; partial_sums =
  ///   input.
  /// tile: adds its part of the output to partial_sums; output = these, rounded. Tiles come in
  ///   ascending order.
  /// tile_backward: given the activation_gradient of the output, adds the gradient of the norm's
  ///   result to partial_sums, which the half's last tile overwrites. Tiles come in descending
  ///   order.
  /// shared_expert, shared_expert_backward: the same for the expert of all rows.
  /// norm_backward: the last pass back through half a layer: turns activation_gradient in place
  ///   into that of the input, given the partial_sums of the tiles.
  /// router: as norm, and decides which experts compute which rows, next to the norm's result and
  ///   in routing: [experts + 1] int32, where the choices of each expert begin among those of all.
  ///   Rows whose target is kPaddingTarget are sent to no expert and count in no loss of the
  ///   routers; without a batch there is no padding. router_totals [sizes().router_totals] fp64:
  ///   sums over all routers; the first router overwrites them. losses [2]: the load-balancing loss
  ///   and the z-loss without their coefficients, written by the last router.
  /// router_backward: as norm_backward.
  /// expert, expert_backward: as tile, for the rows of routing_counts. An expert without rows does
  ///   not read its weights. Adds to the gradient, which clear_gradient() has set to zero.
  /// exchanged_expert, exchanged_expert_backward: the same for a block with an expert per rank: all
  ///   ranks call it, and rows travel to the rank of their expert and back. weights and gradient:
  ///   of this rank's expert.
  /// head_evaluate: losses [parts]: sums of the cross-entropy over equal parts of the rows, usually
  ///   one, or one per sequence. With pairs, [sequences] fp64 and [N] fp32: the reference's losses
  ///   by sequence, and the weights of the rows. A reference model writes the former. The trained
  ///   model reads them, writes the latter (the derivative of the pair's loss by that of the row)
  ///   and reports a PairResult per pair in losses; zeros for a pair without targets.
  ///   output_weights: of the tied block.
  /// head_train: the same losses for all tiles of the vocabulary, activation_gradient =
  ///   loss_gradient * that of the input, and adds to the gradients. Logits exist only for a chunk
  ///   of rows at a time; of several chunks of pairs they are computed twice. kept: if there are
  ///   several tiles.
  ///
  /// Tile by tile, with the bits of head_train: norm; head_scan of all tiles in ascending order;
  /// head_differentiate in descending order; head_end. Pass::number: of the tile.
  /// head_scan: adds the tile to the sums in normed. With losses or pairs, those of head_evaluate:
  ///   for the last tile, where they are wanted before the end.
  /// head_differentiate: adds the tile's part to partial_sums, which the last tile overwrites, and
  ///   to the tile's gradient (output_gradient if the matrix is tied). Either may be missing: the
  ///   two may be visits of their own.
  /// head_end: losses; with activation_gradient also that, given partial_sums.
  virtual void run(device::Stream& stream, const Pass& pass, const PassArguments& arguments) = 0;

  /// Prepares the accumulators of `block` for a step, which begins with Accumulation::first: sets
  /// all to zero but the matrices of layers and the output matrix, each of which one product
  /// overwrites. The tied gradient needs no preparation.
  virtual void clear_gradient(device::Stream& stream, std::size_t block,
                              DeviceView<float> gradient) = 0;
  /// Sets values to zero.
  virtual void zero(device::Stream& stream, DeviceView<float> gradient) = 0;
  /// packed = gradient + tied (the tied part added to the first tied.size() elements), rounded to
  /// the training type to nearest even; writes the statistics of the packed values, unless `stats`
  /// is empty.
  virtual void pack_gradient(device::Stream& stream, DeviceView<const float> gradient,
                             DeviceView<const float> tied, DeviceBytes packed,
                             DeviceView<GradientStats> stats) = 0;
  /// The statistics of packed values (of the training type), equal to pack_gradient()'s. Works on
  /// any stream: uses `scratch` (device memory, a GradientStats per kStatsChunk values) instead of
  /// the workspace.
  virtual void measure_gradient(device::Stream& stream, ConstDeviceBytes packed,
                                DeviceBytes scratch, DeviceView<GradientStats> stats) = 0;

  /// `codes` (WeightCodes::bytes_of the elements) = `weights` (of the training type, a multiple of
  /// WeightCodes::kBlock elements) as codes. Works on any stream, without the workspace.
  virtual void encode_weights(device::Stream& stream, ConstDeviceBytes weights,
                              DeviceBytes codes) = 0;
  /// `weights` = decoded `codes`, rounded to the training type; otherwise as above.
  virtual void decode_weights(device::Stream& stream, ConstDeviceBytes codes,
                              DeviceBytes weights) = 0;
  /// `weights` (of all elements of a block, in the training type) = those of a block of a quantised
  /// base as they are kept in `stored`: plain ones, then BlockCodes. Padding between tensors stays
  /// as it is.
  virtual void decode_block(device::Stream& stream, std::size_t block, ConstDeviceBytes stored,
                            DeviceBytes weights) = 0;
};

/// Kernels of the CUDA device; the host device has its own.
struct KernelOptions {
  AttentionBackend attention = AttentionBackend::best;
  /// Products take the timed algorithms of these; null: those that the library's heuristic names
  /// first.
  std::shared_ptr<ProductChoices> products;
};

/// Makes the kernels for `device` (its kind decides the implementation). `type`: the type of
/// weights and activations; sums are fp32. Throws Error(device) when the
/// device's kind has no kernels.
std::unique_ptr<Compute> make_compute(device::Device& device, const Architecture& model, DType type,
                                      MicroBatchShape shape, const KernelOptions& options = {});

/// Compute::sizes() for a device of that kind, computed without a device. `compute_threads` as in
/// device::DeviceOptions. Throws like make_compute().
KernelSizes kernel_memory(const Architecture& model, DType type, MicroBatchShape shape,
                          std::string_view device_kind, int compute_threads = 0);

/// Instruction set and library of the host device's kernels with `threads` threads, in a few words.
std::string host_kernels(int threads);

/// Best matrix-multiply rate of this machine in `type`, FLOP/s: the fastest of a few square
/// products on the device, measured for about `seconds`. Utilisation is relative to it.
double measure_gemm_peak(device::Device& device, DType type, double seconds = 0.5);

}  // namespace ballast::model
