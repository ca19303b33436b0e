#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "ballast/core/error.h"
#include "ballast/core/memory.h"
#include "ballast/model/architecture.h"
#include "ballast/model/attention.h"
#include "ballast/model/compute.h"
#include "ballast/model/family.h"

#include "src/model/compute/formulas.h"
#include "src/model/compute/kernel_arguments.h"
#include "src/model/compute/layer_memory.h"
#include "src/model/compute/matrix.h"
#include "src/model/compute/sequence_exchange.h"
#include "src/model/compute/tensor_offsets.h"
#include "src/model/ops/device_ops.h"
#include "src/model/ops/row_arguments.h"

namespace ballast::model {

// Forward and backward of blocks, written once for all devices. `Ops` are the operations of one
// device (../ops/device_ops.h); their arguments are views of its memory.

/// The model that a pass computes. Without preference pairs it is always the policy.
enum class ModelRole : std::uint8_t {
  policy,    ///< the model that is trained
  reference  ///< the frozen weights that training began with, without adapters
};

/// Weights of one block, and gradients of its trained elements, the first ones. The gradients are
/// empty in a forward pass.
template <class T>
struct BlockWeights {
  std::size_t layer = 0;  ///< index among the blocks of layers, if it is one
  const T* weights = nullptr;
  DeviceView<float> gradient;
  Accumulation accumulation = Accumulation::later;
  Dropout dropout = {};
  ModelRole role = ModelRole::policy;

  [[nodiscard]] Norm<T> operator[](const NormAt& at) const {
    return {weights + at.weight, at.bias ? weights + *at.bias : nullptr,
            sum(at.weight),      at.bias ? sum(*at.bias) : nullptr,
            at.offset,           at.epsilon};
  }
  /// Returns the sinks at `logits`, if there are any.
  [[nodiscard]] AttentionSinks<T> sinks(const std::optional<Elems>& logits) const {
    if (!logits) return {};
    return {weights + *logits, sum(*logits)};
  }
  [[nodiscard]] Linear<T> operator[](const LinearAt& at) const {
    return {weights + at.weight,
            at.bias ? weights + *at.bias : nullptr,
            sum(at.weight),
            at.bias ? sum(*at.bias) : nullptr,
            at.in,
            at.out,
            at.flipped,
            accumulation == Accumulation::first};
  }

 private:
  [[nodiscard]] float* sum(Elems offset) const {
    return offset < gradient.size() ? gradient.raw() + offset : nullptr;
  }
};

/// Values that layers share besides the residual stream (null: not there), see the ports of these
/// names.
template <class T>
struct LayerLinks {
  T* keys_values = nullptr;  ///< the forward pass of their layer writes them
  float* keys_values_gradient = nullptr;
  T* inputs = nullptr;  ///< the forward pass of the first layer writes them
  T* inputs_gradient = nullptr;
  const T* table_rows = nullptr;
  float* table_rows_gradient = nullptr;
  bool backward = false;  ///< whether the call is a backward pass
};

/// The sequences of a micro-batch for layers.
struct LayerSequences {
  const std::int32_t* positions = nullptr;  ///< arguments of rotate(); may be null
  const std::int32_t* documents = nullptr;  ///< AttentionMask::positions
  SequenceSlice slice;
};

/// Adds the gradient of the bias of `map`, if wanted, given dy with rows `step` apart.
template <class Ops, class T>
void add_bias_gradient(Ops& ops, const Linear<T>& map, const T* dy, std::size_t step,
                       std::size_t rows) {
  if (map.bias_gradient == nullptr) return;
  ops.elementwise->add_column_sums(dy, step, map.bias_gradient, rows, map.out);
}

/// Number of rows per chunk, for equal chunks of at most `limit` bytes: a multiple of 16, unless
/// one chunk has all rows. `row`: bytes of a row.
inline std::size_t chunk_rows(std::size_t rows, Bytes row, Bytes limit) {
  constexpr std::size_t kStep = 16;
  const std::size_t most = std::max<std::size_t>(limit / row, kStep);
  const std::size_t chunks = (rows + most - 1) / most;
  return std::min(rows, round_up((rows + chunks - 1) / chunks, kStep));
}

/// Forward and backward passes of a model's transformer layers, one layer or tile at a time.
template <class Ops>
class Layer {
 public:
  using T = typename Ops::Value;

  Layer(const Architecture& model, const AttentionShape& shape, Ops& ops, const LayerArrays& arrays)
      : shapes_(attention_shapes(config_of_tile(model.config),
                                 {shape.sequences, shape.length, shape.slices})),
        shape_(shape),
        rows_(shape.tokens()),
        width_(model.config.hidden_size),
        wide_(std::max<std::size_t>(arrays.wide, config_of_tile(model.config).intermediate_size)),
        arrays_(arrays),
        mlp_rows_(arrays.cuts_mlp
                      ? chunk_rows(rows_, arrays.mlp * wide_ * sizeof(T), ops.traits.mlp.bytes)
                      : rows_),
        ops_(ops),
        exchange_(shapes_, ops),
        head_norms_(arrays.head_norms) {
    for (const BlockSpec& block : model.blocks) {
      if (block.kind != BlockKind::layer) continue;
      const AttentionShape own = attention_shape(
          config_of_tile(model.config), {shape.sequences, shape.length, shape.slices}, block.layer);
      const auto found =
          std::find_if(shapes_.begin(), shapes_.end(),
                       [&](const AttentionShape& one) { return have_same_heads(one, own); });
      shape_of_.push_back(static_cast<std::size_t>(found - shapes_.begin()));
    }
  }
  virtual ~Layer() = default;
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  /// Takes the memory for one call.
  virtual void take_memory(Bump& bump) {
    std::size_t most = 0;
    const auto count = [&](const Extents& layer) {
      Bump counting;
      take_intermediates(counting, false, BlockContent::whole, layer);
      most = std::max(most, counting.used());
    };
    for (const AttentionShape& shape : shapes_) count({Mixer::attention, shape, wide_});
    if (arrays_.delta.key_heads > 0) count({Mixer::delta_net, shapes_.front(), wide_});
    shared_ = bump.take<std::byte>(most);
    attention_scratch_ = bump.take<std::byte>(ops_.attention->attention_scratch_bytes());
    exchange_.take_memory(bump);
  }

  /// Bytes of the kept intermediates of a layer or of its first half. `layer` as in BlockWeights.
  [[nodiscard]] std::size_t intermediate_bytes(BlockContent content, std::size_t layer) const {
    Bump counting;
    take_intermediates(counting, true, content, extents_of(layer));
    return counting.used();
  }

  /// Bytes of the results of attention and of the map after it; 0 if the layer cannot keep them
  /// without the rest. `layer` as in BlockWeights.
  [[nodiscard]] std::size_t attention_bytes(BlockContent content, std::size_t layer) const {
    if (!arrays_.keeps_attention || arrays_.tiles) return 0;
    Bump counting;
    LayerMemory<T> memory;
    take_attention(counting, memory, content, extents_of(layer));
    return counting.used();
  }

  /// Returns the first half of layer `layer`, an index as in BlockWeights.
  [[nodiscard]] virtual Mixer mixer_of(std::size_t /*layer*/) const { return Mixer::attention; }
  /// Returns the width of the MLP of layer `layer`, an index as in BlockWeights.
  [[nodiscard]] virtual std::size_t mlp_width_of(std::size_t /*layer*/) const { return wide_; }

  /// Takes memory that lasts between calls. Other blocks use the memory of take_memory() in
  /// between.
  virtual void take_lasting_memory(Bump& /*bump*/) {}

  /// Views as in Kernel::layer. Runs on `stream`.
  void forward(device::Stream& stream, const BlockWeights<T>& block,
               const LayerSequences& sequences, const T* in, T* out, const KeptValues& kept,
               const LayerLinks<T>& links = {}) {
    select_heads(block.layer);
    links_ = links;
    use(sequences, kept, part_of(block), extents_of(block.layer));
    exchange_.use(sequences.slice, stream);
    compute(block, in);
    project(block, in, out);
  }
  /// Views as in Kernel::layer_backward. Runs on `stream`.
  void backward(device::Stream& stream, const BlockWeights<T>& block,
                const LayerSequences& sequences, const T* in, T* dy, const KeptValues& kept,
                const LayerLinks<T>& links = {}) {
    select_heads(block.layer);
    links_ = links;
    links_.backward = true;
    use(sequences, kept, part_of(block), extents_of(block.layer));
    exchange_.use(sequences.slice, stream);
    has_kept_attention_ = kept.attention != nullptr;
    if (kept.all == nullptr) compute(block, in);
    differentiate(block, in, dy);
  }

  // Tiles. The defaults throw Error(state); families without tiles leave them.

  /// Returns the norm of a block of BlockContent::norm or router. `layer` as in BlockWeights.
  [[nodiscard]] virtual NormAt norm_of(std::size_t /*layer*/) const { refuse_tiles(); }
  [[nodiscard]] const HeadNorms& head_norms() const { return head_norms_; }
  /// Appends the weights of the norms of heads in `block` to the result of its norm.
  virtual void append_head_norms(const BlockWeights<T>& /*block*/, T* /*normed*/) {
    refuse_tiles();
  }
  /// Adds the slices after `sums` to the gradients of the norms of heads in `block`.
  virtual void add_head_norm_gradients(const BlockWeights<T>& /*block*/, const float* /*sums*/) {
    refuse_tiles();
  }
  /// Writes the tile's part of the output [N, H]. `x` [N, H]: result of the norm.
  void forward_tile(const BlockWeights<T>& block, const LayerSequences& sequences, const T* x,
                    float* part) {
    use(sequences, {}, BlockContent::whole, {mixer_of(block.layer), shape_, wide_});
    head_gradient_ = nullptr;
    compute_tile(block, x, part);
  }
  /// Writes the tile's part of the gradient of `x` [N, H], and a tile of attention its slice of
  /// head_norms(), if there are any.
  void backward_tile(const BlockWeights<T>& block, const LayerSequences& sequences, const T* x,
                     const T* dy, float* part, float* slice) {
    use(sequences, {}, BlockContent::whole, {mixer_of(block.layer), shape_, wide_});
    head_gradient_ = slice;
    differentiate_tile(block, x, dy, part);
  }

 protected:
  /// The extents of a layer that decide its intermediates.
  struct Extents {
    Mixer mixer = Mixer::attention;
    AttentionShape heads;
    std::size_t wide = 0;  ///< width of the MLP
  };

  /// Computes the intermediates except those of MlpChunks: everything before the last product, or
  /// before the MLP.
  virtual void compute(const BlockWeights<T>& block, const T* in) = 0;
  /// Computes the rest, up to the last product.
  virtual void project(const BlockWeights<T>& block, const T* in, T* out) = 0;
  /// Backward pass, from the results of compute() and, with kept_, the MlpChunks.
  virtual void differentiate(const BlockWeights<T>& block, const T* in, T* dy) = 0;
  /// Implement the functions of tiles above.
  virtual void compute_tile(const BlockWeights<T>& /*block*/, const T* /*x*/, float* /*part*/) {
    refuse_tiles();
  }
  virtual void differentiate_tile(const BlockWeights<T>& /*block*/, const T* /*x*/, const T* /*dy*/,
                                  float* /*part*/) {
    refuse_tiles();
  }

  /// Returns whether the forward pass has kept the results of attention and of the map after it:
  /// LayerMemory's attention and log_sums, or recurred and states, attention_out and middle.
  [[nodiscard]] bool has_kept_attention() const { return has_kept_attention_; }

  /// Calls work(MlpChunk) for all rows of an MLP of `width`, in order. Chunks and their layout
  /// depend only on the shape, so that results do not depend on what is kept.
  template <class Work>
  void by_chunks(std::size_t width, const Work& work) const {
    for (std::size_t first = 0; first < rows_; first += mlp_rows_) {
      MlpChunk<T> chunk{.first = first, .rows = std::min(mlp_rows_, rows_ - first), .width = width};
      const std::size_t place = kept_ ? first : 0;
      chunk.hidden = memory_.hidden + place * arrays_.mlp * width;
      chunk.activated = chunk.hidden + (arrays_.mlp - 1) * chunk.rows * width;
      if (arrays_.mlp_out) chunk.mlp_out = memory_.mlp_out + place * width_;
      work(chunk);
    }
  }

  /// Returns whether the block is a whole layer or its first half, which has no MLP.
  [[nodiscard]] virtual BlockContent part_of(const BlockWeights<T>& /*block*/) const {
    return BlockContent::whole;
  }

  void take_attention(Bump& bump, LayerMemory<T>& memory, BlockContent content,
                      const Extents& own) const {
    const bool half = content == BlockContent::attention_half;
    if (own.mixer == Mixer::delta_net) {
      take_recurrence(bump, memory);
    } else {
      memory.attention = bump.take<T>(rows_ * own.heads.width());
      if (exchange_.is_needed()) memory.attended = bump.take<T>(rows_ * own.heads.width());
      memory.log_sums = bump.take<float>(own.heads.log_sums());
    }
    memory.attention_out = arrays_.attention_out ? bump.take<T>(rows_ * width_) : nullptr;
    memory.middle = half ? nullptr : bump.take<T>(rows_ * width_);
  }

  void take_recurrence(Bump& bump, LayerMemory<T>& memory) const {
    memory.recurred = bump.take<T>(rows_ * arrays_.delta.values());
    memory.states = bump.take<float>(arrays_.delta.states());
  }
  /// Takes the arrays before the last map of attention or of a delta net.
  void take_mixer(Bump& bump, LayerMemory<T>& memory, const Extents& own) const {
    const auto take_if = [&](bool wanted, std::size_t width) {
      return wanted ? bump.take<T>(rows_ * width) : nullptr;
    };
    if (own.mixer == Mixer::delta_net) {
      memory.mixed = bump.take<T>(rows_ * arrays_.delta.row());
      memory.channels = bump.take<T>(rows_ * arrays_.delta.channels());
      return take_recurrence(bump, memory);
    }
    const AttentionShape& heads = own.heads;
    memory.projected = take_if(arrays_.projected, projected_row(heads));
    memory.low_queries = take_if(arrays_.query_rank > 0, arrays_.query_rank);
    memory.low_queries_normed = take_if(arrays_.query_rank > 0, arrays_.query_rank);
    memory.low = take_if(arrays_.rank > 0, arrays_.rank + arrays_.shared_keys);
    memory.low_normed = take_if(arrays_.rank > 0, arrays_.rank);
    memory.qkv = bump.take<T>(rows_ * heads.row());
    memory.attention = bump.take<T>(rows_ * heads.width());
    memory.attended = take_if(exchange_.is_needed(), heads.width());
    memory.log_sums = bump.take<float>(heads.log_sums());
  }

  /// Memory for the intermediates of a layer or of its first half. If they are not kept, those of
  /// the MLP exist for one chunk of rows at a time.
  LayerMemory<T> take_intermediates(Bump& bump, bool kept, BlockContent content,
                                    const Extents& own) const {
    LayerMemory<T> memory;
    const bool half = content == BlockContent::attention_half;
    const std::size_t mlp_rows = half ? 0 : (kept ? rows_ : mlp_rows_);
    const auto take_if = [&](bool wanted, std::size_t width) {
      return wanted ? bump.take<T>(rows_ * width) : nullptr;
    };
    memory.norm1 = take_if(arrays_.norm1, width_);
    const bool recurs = own.mixer == Mixer::delta_net;
    const std::size_t results = recurs ? arrays_.delta.values() : own.heads.width();
    const std::size_t inputs = recurs ? arrays_.delta.row() : own.heads.row();
    take_mixer(bump, memory, own);
    memory.attention_out = take_if(arrays_.attention_out, width_);
    memory.middle = take_if(!arrays_.tiles && !half, width_);
    memory.gradient = bump.take<T>(
        rows_ * (arrays_.tiles ? results : std::max({width_, results, arrays_.expanded})));
    memory.norm2 = arrays_.tiles ? nullptr : memory.gradient;
    memory.mlp_out = arrays_.mlp_out && !half ? bump.take<T>(mlp_rows * width_) : nullptr;
    memory.dqkv = bump.take<T>(std::max(mlp_rows * arrays_.mlp * own.wide, rows_ * inputs));
    if (memory.dqkv == nullptr) return memory;  // only counted
    memory.hidden = memory.dqkv;
    memory.activated = memory.dqkv + (arrays_.mlp - 1) * mlp_rows * own.wide;
    return memory;
  }

  /// Row length of LayerMemory::projected.
  [[nodiscard]] std::size_t projected_row(const AttentionShape& shape) const {
    return (arrays_.output_gate ? 2 : 1) * shape.width() +
           (arrays_.projected_values ? 2 : 1) * shape.kv_width();
  }

  /// Exchanges queries, keys and values with the ranks that share the sequences. attend() does so
  /// itself.
  void exchange_projections() {
    if (exchange_.is_needed())
      exchange_.to_heads(exchange_.projections(), memory_.qkv, memory_.qkv);
  }
  /// `window`: as in AttentionMask.
  void attend(std::size_t window = 0, const AttentionSinks<T>& sinks = {}) {
    exchange_projections();
    const bool shared = exchange_.is_needed();
    T* const out = shared ? memory_.attended : memory_.attention;
    ops_.attention->attention({window, sequences_.documents}, exchange_.own(sinks), memory_.qkv,
                              out, memory_.log_sums, attention_scratch_);
    if (shared) exchange_.to_rows(exchange_.results(), out, memory_.attention);
  }
  /// gradient (of attention) -> dqkv, and the gradients of the sinks.
  void attend_backward(std::size_t window = 0, const AttentionSinks<T>& sinks = {}) {
    const bool shared = exchange_.is_needed();
    if (shared) exchange_.to_heads(exchange_.results(), memory_.gradient, memory_.gradient);
    ops_.attention->attention_backward({window, sequences_.documents}, exchange_.own(sinks),
                                       memory_.qkv, shared ? memory_.attended : memory_.attention,
                                       memory_.log_sums, memory_.gradient, memory_.dqkv,
                                       attention_scratch_);
    if (shared) exchange_.to_rows(exchange_.projections(), memory_.dqkv, memory_.dqkv);
  }

  /// Calls `bind` for every layer of `model` and returns the results.
  template <class Bind>
  static auto bind_layers(const Architecture& model, const Bind& bind) {
    std::vector<decltype(bind(model.blocks.front()))> bound;
    for (const BlockSpec& block : model.blocks) {
      if (block.kind == BlockKind::layer) bound.push_back(bind(block));
    }
    return bound;
  }

  std::vector<AttentionShape> shapes_;  ///< attention_shapes()
  AttentionShape shape_;                ///< that of the current call
  std::size_t rows_;                    ///< N
  std::size_t width_;                   ///< H
  std::size_t wide_;                    ///< I
  LayerArrays arrays_;
  std::size_t mlp_rows_;  ///< rows per chunk
  Ops& ops_;
  LayerMemory<T> memory_;            ///< that of the current call
  bool kept_ = false;                ///< whether the current call keeps its intermediates
  bool has_kept_attention_ = false;  ///< see has_kept_attention()
  LayerSequences sequences_;         ///< sequences of the current call
  LayerLinks<T> links_;              ///< values of the current call
  SequenceExchange<T> exchange_;
  HeadNorms head_norms_;
  float* head_gradient_ = nullptr;  ///< slice of the current call's tile; null in a forward pass

 private:
  [[noreturn]] static void refuse_tiles() {
    throw Error(ErrorCategory::state, "layers of this family are not cut into tiles");
  }
  [[nodiscard]] Extents extents_of(std::size_t layer) const {
    return {mixer_of(layer), shapes_[shape_of_[layer]], mlp_width_of(layer)};
  }
  void select_heads(std::size_t layer) {
    if (shapes_.size() == 1) return;
    shape_ = shapes_[shape_of_[layer]];
    ops_.attention->use_heads(shape_of_[layer]);
    exchange_.use_heads(shape_);
  }
  void use(const LayerSequences& sequences, const KeptValues& kept, BlockContent content,
           const Extents& own) {
    sequences_ = sequences;
    kept_ = kept.all != nullptr;
    has_kept_attention_ = false;
    Bump bump(kept_ ? kept.all : shared_);
    memory_ = take_intermediates(bump, kept_, content, own);
    if (kept.attention == nullptr) return;
    Bump attention(kept.attention);
    take_attention(attention, memory_, content, own);
  }

  std::vector<std::size_t> shape_of_;  ///< index in shapes_ by block of layers
  std::byte* shared_ = nullptr;        ///< intermediates of calls without `kept`
  std::byte* attention_scratch_ = nullptr;
};

}  // namespace ballast::model
