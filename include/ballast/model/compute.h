#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/view.h"
#include "ballast/device/device.h"
#include "ballast/model/architecture.h"
#include "ballast/model/gradient_stats.h"
#include "ballast/model/kernel_sizes.h"
#include "ballast/model/preference.h"
#include "ballast/model/product_choices.h"

namespace ballast::model {

/// Which micro-batch of a step a backward pass is.
enum class Accumulation : std::uint8_t {
  first,  ///< the first after clear_gradient(): overwrites the gradients of matrices
  later   ///< adds to all gradients
};

/// Which elements a layer with AdapterConfig::dropout leaves out: the same for the forward and the
/// backward pass of one micro-batch, others for every other one.
struct Dropout {
  bool on = false;        ///< not in an evaluation
  std::uint64_t key = 0;  ///< of the seed, the step and the micro-batch
};

/// Which model a pass computes.
enum class Subject : std::uint8_t {
  trained,
  reference  ///< the same without its adapters: the frozen weights that training began with
};

/// A micro-batch of pairs: sequences 2 i and 2 i + 1 are the chosen and the rejected one of pair i.
struct Pairs {
  Preference preference;
  /// [sequences]: sums of the cross-entropy, as the head reports them of the reference.
  DeviceView<const double> reference;
  /// [N], written before any gradient: the derivative of the pair's loss by that of the row.
  DeviceView<float> weights;
};

/// What the head reports of the cross-entropy of the rows, in nats.
struct HeadLosses {
  /// The sums over as many equal parts of the rows as there are elements, usually one or one for
  /// each sequence. With `pairs`: [sequences / 2] PairResults. A pair without targets reports
  /// zeros.
  DeviceView<double> out = {};
  std::optional<Pairs> pairs = {};
};

/// A tile of the output matrix, see Architecture::tile().
struct OutputTile {
  std::size_t number = 0;
  ConstDeviceBytes weights;  ///< flat, of the tile's whole block
  /// Accumulators: untied, the flat ones of the tile's block; tied, [rows of the tile, H]. Empty:
  /// not wanted.
  DeviceView<float> gradient = {};
};

/// What a router tells besides its rows.
struct RouterResults {
  /// [experts + 1]: where the choices of each expert begin among those of all.
  DeviceView<std::int32_t> starts;
  /// [memory().router_totals]: sums over the routers of the model, which are called in order. The
  /// first one begins from zero.
  DeviceView<double> totals;
  /// [2]: the load-balancing loss and the z-loss of the micro-batch, without their coefficients;
  /// the last router writes them.
  DeviceView<double> losses;
};

/// The choices that one expert computes, by number among those of all.
struct ExpertChoices {
  std::size_t first = 0;
  std::size_t count = 0;
};

/// Moves rows between the ranks that share the experts of a block (comm::Communicator::all_to_all).
class RowExchange {
 public:
  virtual ~RowExchange() = default;
  RowExchange() = default;
  RowExchange(const RowExchange&) = delete;
  RowExchange& operator=(const RowExchange&) = delete;

  /// Sends part p of `leaving` to the rank with expert p of a block and receives part p of
  /// `arriving` from it. Bytes by part. Enqueues on `stream`.
  virtual void exchange(device::Stream& stream, ConstDeviceBytes leaving,
                        std::span<const Bytes> leaving_parts, DeviceBytes arriving,
                        std::span<const Bytes> arriving_parts) = 0;
};

/// The choices of all ranks for the experts of a block with one for each of them.
struct SharedChoices {
  std::vector<ExpertChoices> leaving;  ///< by expert: those of this rank
  /// By the expert of the rank that has chosen: how many are for this rank's expert.
  std::vector<std::size_t> arriving;
  std::size_t most = 0;  ///< of one rank for one expert; the same on all ranks
};

/// Forward and backward of blocks on one device. Calls enqueue on `stream` and return; views stay
/// valid until the stream is synchronised. One object has one workspace, so its calls go to one
/// stream (unless a function says that it works on any). Results depend only on inputs, shape and
/// the number of compute threads.
///
/// Shapes, with N = shape.tokens(), H = hidden_size, V = vocab_size, E = elements of the block:
/// activations [N, H] row-major in the training type; weights [E] flat in the training type;
/// gradient accumulators [E] flat fp32; tokens [N] in [0, V) and targets [N] below V, else the
/// stream fails with Error(data). A negative target has no loss. positions [N]: those of the tokens
/// in their documents, each 0 or one more than the one before it in its sequence; attention and
/// positions of the model stay inside a document. Empty: every sequence is one document.
class Compute {
 public:
  virtual ~Compute() = default;
  Compute() = default;
  Compute(const Compute&) = delete;
  Compute& operator=(const Compute&) = delete;

  /// Bytes of one activation [N, H].
  [[nodiscard]] virtual Bytes activation_bytes() const = 0;
  [[nodiscard]] virtual const KernelSizes& memory() const = 0;
  /// Describes on what the bits of results depend besides the inputs, in a few words: instruction
  /// sets, libraries and, where they matter, threads. Empty: on the device alone.
  [[nodiscard]] virtual std::string arithmetic() const = 0;
  /// Sets the workspace, at least memory().workspace bytes. Call it before the kernels.
  virtual void set_workspace(DeviceBytes workspace) = 0;

  /// Block `block` of the embedding: out = token embedding (+ position embedding). A tile writes
  /// the rows of its tokens; the last one adds the positions to all rows.
  virtual void embedding_forward(device::Stream& stream, std::size_t block,
                                 ConstDeviceBytes weights, DeviceView<const std::int32_t> tokens,
                                 DeviceView<const std::int32_t> positions, DeviceBytes out) = 0;
  /// Adds the gradient of `dy` to the rows of the block's tokens, in token order.
  virtual void embedding_backward(device::Stream& stream, std::size_t block,
                                  DeviceView<const std::int32_t> tokens,
                                  DeviceView<const std::int32_t> positions, ConstDeviceBytes dy,
                                  DeviceView<float> gradient) = 0;

  /// Block `block`, a layer in one piece. `out` may not alias `in`. `kept`: page-aligned
  /// device memory of at least memory().intermediates[block] for intermediates that
  /// layer_backward() would otherwise recompute; empty: keeps none.
  virtual void layer_forward(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                             DeviceView<const std::int32_t> positions, ConstDeviceBytes in,
                             DeviceBytes out, DeviceBytes kept, Dropout dropout = {},
                             Subject subject = Subject::trained) = 0;
  /// Turns `dy` (gradient of the output) in place into the gradient of `in` and adds the weights'
  /// gradients to `gradient`. `kept`: as layer_forward() with the same weights and `in` left it; it
  /// is overwritten. Empty: recomputes the block from `in` first, with the same bits.
  virtual void layer_backward(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                              DeviceView<const std::int32_t> positions, ConstDeviceBytes in,
                              DeviceBytes dy, DeviceView<float> gradient, Accumulation accumulation,
                              DeviceBytes kept, Dropout dropout = {}) = 0;

  /// The norm before tiles: of the head's first block, or of a block of LayerPart::norm. `rows`:
  /// device memory of memory().rows bytes that keeps its result, and what else is known of the
  /// rows, for the tiles. `sums`: accumulators [N, H], set to `in`; empty: not wanted.
  virtual void normalize(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                         ConstDeviceBytes in, DeviceBytes rows, DeviceView<float> sums) = 0;
  /// Block `block`, a tile of a layer, after normalize(): adds its part of the output to `sums`.
  /// `out`: those, rounded; empty: not wanted. Tiles come in ascending order.
  virtual void tile_forward(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                            DeviceView<const std::int32_t> positions, DeviceBytes rows,
                            DeviceView<float> sums, DeviceBytes out) = 0;
  /// Given `dy`, the gradient of the output: adds the gradient of the norm's result to `sums` (the
  /// half's last tile overwrites them) and those of the tile's weights to `gradient`. Tiles come in
  /// descending order.
  virtual void tile_backward(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                             DeviceView<const std::int32_t> positions, DeviceBytes rows,
                             ConstDeviceBytes dy, DeviceView<float> sums,
                             DeviceView<float> gradient, Accumulation accumulation) = 0;
  /// The last step of the backward pass through half a layer: turns `dy` in place into the gradient
  /// of `in`, given the `sums` of its tiles, and adds the norm's gradient to `gradient`.
  virtual void norm_backward(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                             ConstDeviceBytes in, DeviceView<float> sums, DeviceBytes dy,
                             DeviceView<float> gradient) = 0;

  // Layers with experts. An expert is a tile that computes only the rows which the router sends to
  // it; the caller reads their numbers from what route() has written.

  /// The norm and the router in `block`, of LayerPart::router: as normalize(), and decides which
  /// experts compute which rows. `targets` [N]: those of head_train(). Rows of padding
  /// (kPaddingTarget) are sent to no expert and count in no loss of the routers; empty: there is no
  /// padding. `results`: empty members are not wanted.
  virtual void route(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                     ConstDeviceBytes in, DeviceView<const std::int32_t> targets, DeviceBytes rows,
                     DeviceView<float> sums, const RouterResults& results) = 0;
  /// The expert in `block` for its choices [choices.first, choices.first + choices.count), as
  /// tile_forward(). An expert without choices does not read its weights.
  virtual void expert_forward(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                              DeviceBytes rows, ExpertChoices choices, DeviceView<float> sums,
                              DeviceBytes out) = 0;
  /// As tile_backward(); adds to `gradient`, which clear_gradient() has set to zero.
  virtual void expert_backward(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                               DeviceBytes rows, ExpertChoices choices, ConstDeviceBytes dy,
                               DeviceView<float> sums, DeviceView<float> gradient) = 0;
  /// The same for a block with an expert for each rank: all ranks call it, and rows travel to the
  /// rank of their expert and back. `weights` and `gradient`: of this rank's expert.
  virtual void shared_experts_forward(device::Stream& stream, std::size_t block,
                                      ConstDeviceBytes weights, DeviceBytes rows,
                                      const SharedChoices& choices, RowExchange& exchange,
                                      DeviceView<float> sums, DeviceBytes out) = 0;
  virtual void shared_experts_backward(device::Stream& stream, std::size_t block,
                                       ConstDeviceBytes weights, DeviceBytes rows,
                                       const SharedChoices& choices, RowExchange& exchange,
                                       ConstDeviceBytes dy, DeviceView<float> sums,
                                       DeviceView<float> gradient) = 0;
  /// The last step of the backward pass, as norm_backward(). `totals`: of all routers; `scale`: of
  /// their losses, the same for all micro-batches.
  virtual void router_backward(device::Stream& stream, std::size_t block, ConstDeviceBytes weights,
                               ConstDeviceBytes in, DeviceBytes rows, DeviceView<float> sums,
                               DeviceView<double> totals, float scale, DeviceBytes dy,
                               DeviceView<float> gradient, Accumulation accumulation) = 0;

  /// The head, evaluation, for a vocabulary of one tile. `weights`: of the block with the final
  /// norm. `output`: the flat weights of the tile's block.
  virtual void head_forward(device::Stream& stream, ConstDeviceBytes weights,
                            ConstDeviceBytes output, ConstDeviceBytes in,
                            DeviceView<const std::int32_t> targets, const HeadLosses& losses) = 0;
  /// The head, training, for all tiles of the vocabulary in one pass: the same losses, and the
  /// gradients of `gradient_scale` * their sum: `dx` [N, H] is written, `gradient` (of the block
  /// with the norm) and those of the tiles are added to. Logits exist only for a chunk of rows at a
  /// time; of several chunks of pairs they are computed twice. `kept`: page-aligned device memory
  /// of memory().intermediates of the head's first block; empty with one tile.
  virtual void head_train(device::Stream& stream, ConstDeviceBytes weights,
                          std::span<const OutputTile> tiles, ConstDeviceBytes in,
                          DeviceView<const std::int32_t> targets, float gradient_scale,
                          DeviceBytes dx, DeviceView<float> gradient, Accumulation accumulation,
                          const HeadLosses& losses, DeviceBytes kept = {}) = 0;

  /// The same tile by tile, with the same bits: normalize(); scan all tiles in ascending order;
  /// differentiate them in descending order; end. `rows`: as in normalize(). `dnormed`:
  /// accumulators [N, H]. `losses`: for the last tile where they are wanted before the end, as of
  /// pairs; else empty.
  virtual void head_scan(device::Stream& stream, const OutputTile& tile,
                         DeviceView<const std::int32_t> targets, DeviceBytes rows,
                         const HeadLosses& losses = {}) = 0;
  /// `weights`: those of Pairs; empty: 1. Adds the tile's part to `dnormed` (the last tile
  /// overwrites it), unless that is empty, and to the tile's gradient, unless that is empty: the
  /// two may be visits of their own.
  virtual void head_differentiate(device::Stream& stream, const OutputTile& tile,
                                  DeviceView<const std::int32_t> targets, float gradient_scale,
                                  DeviceBytes rows, DeviceView<float> dnormed,
                                  Accumulation accumulation,
                                  DeviceView<const float> weights = {}) = 0;
  /// *loss_sum = the sum over all rows; empty: not wanted. In an evaluation `dnormed`, `dx` and
  /// `gradient` are empty.
  virtual void head_end(device::Stream& stream, ConstDeviceBytes weights, ConstDeviceBytes in,
                        DeviceView<const std::int32_t> targets, DeviceBytes rows,
                        DeviceView<float> dnormed, DeviceBytes dx, DeviceView<float> gradient,
                        DeviceView<double> loss_sum) = 0;

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

/// The attention implementation of the CUDA device: own kernels, or cuDNN for the bf16 forward
/// pass. Results of different implementations differ in their bits.
enum class AttentionBackend {
  best,   ///< cuDNN if available
  own,    ///< own kernels
  cudnn,  ///< cuDNN, or an Error
};
/// Reads ballast.attention: "auto" (best), "own" or "cudnn".
AttentionBackend parse_attention_backend(std::string_view name);

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

/// Compute::memory() for a device of that kind, computed without a device. `compute_threads` as in
/// device::DeviceOptions. Throws like make_compute().
KernelSizes kernel_memory(const Architecture& model, DType type, MicroBatchShape shape,
                          std::string_view device_kind, int compute_threads = 0);

/// Instruction set and library of the host device's kernels with `threads` threads, in a few words.
std::string host_kernels(int threads);

/// Best matrix-multiply rate of this machine in `type`, FLOP/s: the fastest of a few square
/// products on the device, measured for about `seconds`. Utilisation is relative to it.
double measure_gemm_peak(device::Device& device, DType type, double seconds = 0.5);

}  // namespace ballast::model
