#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "ballast/core/memory.h"
#include "ballast/model/architecture.h"
#include "ballast/model/attention.h"

#include "src/model/compute/adapted_maps.h"
#include "src/model/compute/array_list.h"
#include "src/model/compute/kernel_arguments.h"
#include "src/model/compute/layer_arguments.h"
#include "src/model/compute/layer_rotation.h"
#include "src/model/compute/layer_shapes.h"
#include "src/model/compute/sequence_exchange.h"
#include "src/model/compute/tensor_offsets.h"
#include "src/model/description/layer_spec.h"
#include "src/model/ops/device_ops.h"

namespace ballast::model {

/// Where a part's result [rows, H] goes: onto a residual stream, alone (no residual), or, for a
/// tile, into its fp32 sums.
template <class T>
struct Output {
  T* to = nullptr;
  const T* residual = nullptr;
  float* part = nullptr;
};

/// Where the gradient of a part's input [rows, H] goes: to the training type or, for a tile, to
/// fp32. `adds`: to what is there.
template <class T>
struct InputGradient {
  T* to = nullptr;
  float* part = nullptr;
  bool adds = false;
};

/// One call of a layer: its block, memory and micro-batch.
template <class T>
struct LayerCall {
  BlockWeights<T> block;
  /// Weights of norms that tiles share (HeadNorms); those of `block` in a whole layer.
  BlockWeights<T> head_norms;
  LayerSequences sequences;
  LayerLinks<T> links;
  const ArrayList* list = nullptr;
  std::byte* memory = nullptr;  ///< memory of all arrays
  std::byte* known = nullptr;   ///< memory of the known arrays, if they are apart
  bool kept = false;            ///< `memory` outlives the call
  bool backward = false;

  /// Whether known arrays have their values, from the forward pass.
  [[nodiscard]] bool knows() const { return backward && known != nullptr; }
  template <class U = T>
  [[nodiscard]] U* at(ArrayList::Id array) const {
    const bool apart = known != nullptr && list->is_known(array);
    return reinterpret_cast<U*>((apart ? known : memory) + list->offset(array, apart));
  }
  /// Returns the call for later chunks of rows, which add to the sums of the first.
  [[nodiscard]] LayerCall later() const {
    LayerCall call = *this;
    call.block.accumulation = Accumulation::later;
    return call;
  }
};

/// Finds the tensors of a body in a block. Without a block, it only knows their extents.
class Binder {
 public:
  Binder(const BlockSpec* block, bool input_first) : block_(block), input_first_(input_first) {}

  [[nodiscard]] LinearAt map(const MapSpec& spec, std::size_t in, std::size_t out) const;
  /// Returns a map, or the ranges of its outputs that a tile has.
  [[nodiscard]] std::vector<LinearAt> ranges(const MapSpec& spec, std::size_t in,
                                             std::size_t out) const;
  [[nodiscard]] NormAt norm(const NormSpec& spec) const;
  /// Returns the place of a tensor with its full name in the layer; 0 without a block.
  [[nodiscard]] Elems offset(std::string_view name) const;
  [[nodiscard]] bool is_tile() const;
  [[nodiscard]] const BlockSpec* block() const { return block_; }

 private:
  const BlockSpec* block_;
  bool input_first_;
};

/// Operations, extents and scratch memory that the layers of a model share.
template <class T>
struct LayerTools {
  DeviceOps<T>& ops;
  AdaptedMaps<T> maps;
  SequenceExchange<T> exchange;
  LayerRotation<T> rotation;
  UnitNorm<T> unit_norm;
  AttentionShape shape;      ///< extents of the micro-batch; heads differ by layer
  std::size_t hidden = 0;    ///< H
  std::size_t mlp_rows = 0;  ///< rows of an MLP at a time
  std::uint64_t layers = 0;
  float norm_epsilon = 0.0F;
  bool tiles = false;
  HeadNorms head_norms;
  // Scratch of one call.
  std::byte* attention_scratch = nullptr;
  std::byte* mixer_scratch = nullptr;
  T* taps = nullptr;               ///< [channels, taps] of a delta net in tiles
  float* taps_gradient = nullptr;  ///< like taps

  [[nodiscard]] std::size_t rows() const { return shape.tokens(); }
  /// Returns a norm in a block, or one without weights.
  [[nodiscard]] Norm<T> norm(const BlockWeights<T>& block, const NormAt& at) {
    return at.plain ? unit_norm.norm(at.offset, at.epsilon) : block[at];
  }
  /// Returns the shape of attention with these heads.
  [[nodiscard]] AttentionShape of(const AttentionSpec& attention) const {
    AttentionShape own = shape;
    own.heads = attention.heads.heads;
    own.kv_heads = attention.heads.kv_heads;
    own.head_dim = attention.heads.head_dim;
    own.value_dim = attention.heads.value_dim;
    own.scale = attention.scale;
    own.cap = attention.cap;
    return own;
  }
};

/// The part of a layer in sharing keys and values (AttentionSpec::keys_of). The shared value has
/// them after norms and rotation. Gradients of all readers are summed in fp32 from the last layer
/// to the first, and rounded once when their layer adds its own.
struct KeySharing {
  bool reads = false;  ///< reads keys and values of another layer
  bool gives = false;  ///< others read its keys and values
  bool last = false;   ///< no later layer reads the same keys and values
};

/// The places that the sublayers of a layer share, one after the other: `turn` in the backward
/// pass, `work` in both.
struct SharedPlaces {
  ArrayList::Place turn = 0;
  ArrayList::Place work = 0;
};

/// The body of a sublayer: forward and backward passes between its norms. Made for one block, whose
/// tensors' places are its members. `x`, `dout` and the gradient of x begin at the first of `rows`.
template <class T>
class LayerPart {
 public:
  using Call = LayerCall<T>;

  virtual ~LayerPart() = default;
  LayerPart(const LayerPart&) = delete;
  LayerPart& operator=(const LayerPart&) = delete;

  /// Declares arrays that share no place, in order.
  virtual void arrays(ArrayList& /*list*/, const LayerMoments& /*at*/) {}
  /// Declares arrays in shared places. `chunk`: rows of one call of prepare().
  virtual void share(ArrayList& list, const LayerMoments& at, const SharedPlaces& places,
                     std::size_t chunk) = 0;
  /// Takes memory for one call that is not in the list.
  virtual void take_scratch(Bump& /*bump*/) {}
  /// Calls visit(map, rows) for the maps that may have adapters.
  virtual void for_maps(const std::function<void(const LinearAt&, std::size_t)>& visit) const = 0;
  /// Whether rows are independent, so that it may run in chunks of rows.
  [[nodiscard]] virtual bool by_rows() const { return false; }

  /// For all rows, before the first chunk. `in`: the layer's input; `stream`: the residual stream
  /// before this sublayer.
  virtual void begin(const Call& /*call*/, const T* /*in*/, const T* /*stream*/) {}
  /// Computes what the backward pass reads, up to the input of the last map. Leaves known arrays
  /// alone if the call knows them.
  virtual void prepare(const Call& call, const T* x, const MapRows& rows) = 0;
  /// The last map.
  virtual void finish(const Call& call, const MapRows& rows, const Output<T>& y) = 0;
  /// Returns where finish() writes a result that has a norm after it.
  virtual T* raw(const Call& call, const MapRows& rows) {
    return call.at(raw_) + (call.kept ? rows.first : 0) * tools_.hidden;
  }
  /// Returns the result that the norm after it reads.
  virtual T* result(const Call& call, const MapRows& rows) { return raw(call, rows); }
  virtual void backward(const Call& call, const T* x, const MapRows& rows, const T* dout,
                        const InputGradient<T>& dx) = 0;
  /// Memory [chunk, H] for the residual stream before a sublayer after the first one by rows.
  virtual T* stream() { return nullptr; }
  /// After the backward pass of this sublayer's norm: adds to the gradient of `stream`.
  virtual void end_sublayer(const Call& /*call*/, const T* /*stream*/, T* /*dstream*/) {}
  /// After the backward pass of all sublayers: adds to the gradient of the layer's input.
  virtual void end_layer(const Call& /*call*/, const T* /*in*/, T* /*din*/) {}

  void use_raw(ArrayList::Id raw) { raw_ = raw; }

 protected:
  explicit LayerPart(LayerTools<T>& tools) : tools_(tools), ops_(tools.ops), maps_(tools.maps) {}

  /// Computes the last map for an Output.
  void onto(const Call& call, const LinearAt& map, const T* x, const Output<T>& y,
            const MapRows& rows) {
    if (y.part != nullptr)
      return ops_.products->linear_part(call.block[map], x, y.part, rows.count);
    if (y.residual == nullptr) return maps_.linear(call.block, map, x, y.to, map.out, rows);
    maps_.linear_onto(call.block, map, x, y.residual, y.to, rows);
  }
  void bias_backward(const Call& call, const LinearAt& map, const T* dy, std::size_t step,
                     const MapRows& rows) {
    add_bias_gradient(ops_, call.block[map], dy, step, rows.count);
  }
  /// Gradients of a map's weights. `dy`: rows `step` apart.
  void weights_backward(const Call& call, const LinearAt& map, const T* x, const T* dy,
                        std::size_t step, const MapRows& rows) {
    bias_backward(call, map, dy, step, rows);
    maps_.linear_weight(call.block, map, x, dy, step, rows);
  }
  /// Gradient of a map's input. `adds`: another map has written to dx before.
  void input_backward(const Call& call, const LinearAt& map, const T* dy, std::size_t step,
                      const InputGradient<T>& dx, const MapRows& rows, bool adds = false) {
    const bool add = adds || dx.adds;
    if (dx.part == nullptr) {
      return maps_.linear_input(call.block, map, dy, step, dx.to, rows, add);
    }
    maps_.linear_input(call.block, map, dy, step, dx.part, rows, add);
  }
  [[nodiscard]] MapRows all() const { return {0, tools_.rows()}; }
  /// Bytes of an array [N, width].
  [[nodiscard]] Bytes by_token(std::size_t width) const {
    return tools_.rows() * width * sizeof(T);
  }

  LayerTools<T>& tools_;
  DeviceOps<T>& ops_;
  AdaptedMaps<T>& maps_;

 private:
  ArrayList::Id raw_ = 0;
};

/// Makes the part for a body of layer `layer`, with its tensors in the binder's block. Throws
/// Error(state) for experts, which have their own passes.
template <class T>
std::unique_ptr<LayerPart<T>> make_part(const BodySpec& body, std::uint64_t layer,
                                        const KeySharing& sharing, const Binder& binder,
                                        LayerTools<T>& tools);

}  // namespace ballast::model
