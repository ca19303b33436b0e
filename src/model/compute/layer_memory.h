#pragma once

#include <cstddef>

#include "src/model/compute/delta_shape.h"
#include "src/model/compute/head_norms.h"

namespace ballast::model {

/// The first half of a layer.
enum class Mixer { attention, delta_net };

/// Optional arrays that a family's layers need, and their form.
struct LayerArrays {
  std::size_t wide = 0;  ///< width of the widest MLP; 0: intermediate_size
  std::size_t mlp = 2;   ///< arrays [N, I] for hidden and activated together, 2 or 3
  /// True: the layer runs its MLP with Layer::by_chunks(). False: on all rows at once.
  bool cuts_mlp = false;
  bool norm1 = true;
  bool projected = false;
  bool projected_values = false;  ///< projected has values, too
  bool output_gate = false;       ///< see DecoderSpec
  bool attention_out = false;
  bool mlp_out = false;
  std::size_t query_rank = 0;   ///< see LatentSpec
  std::size_t rank = 0;         ///< see LatentSpec
  std::size_t shared_keys = 0;  ///< LatentSpec::rotating
  std::size_t expanded = 0;     ///< keys and values of all heads from LatentSpec::up
  DeltaShape delta;             ///< that of the layers with Mixer::delta_net
  /// True if layers are cut into tiles: a call is for one tile, and the caller owns its input.
  bool tiles = false;
  HeadNorms head_norms;  ///< empty unless layers are cut into tiles
  /// True if Layer::compute() leaves out what attention_is_known() says.
  bool keeps_attention = false;
};

/// Memory of a layer's values between its forward and backward pass. At most one is not null.
struct KeptValues {
  std::byte* all = nullptr;        ///< Port::kept
  std::byte* attention = nullptr;  ///< Port::kept_attention
};

/// Intermediates of one layer, with N tokens, H hidden_size, A heads x head_dim, I
/// intermediate_size. The forward pass writes them; the backward pass reads and overwrites them. If
/// the MLP is cut, hidden, activated and mlp_out are in its MlpChunks. For tiles of layers, A and I
/// are those of the widest tile, and norm1, middle and norm2 do not exist.
template <class T>
struct LayerMemory {
  T* norm1 = nullptr;      ///< [N, H] input of the attention's projection
  T* projected = nullptr;  ///< [N, queries | keys] before their norms, perhaps with values, with an
                           ///< output gate [N, queries | gates | keys]
  // Results of maps of low rank and of their norms (LatentSpec), later their gradients.
  T* low_queries = nullptr;         ///< [N, query_rank]
  T* low_queries_normed = nullptr;  ///< [N, query_rank]
  T* low = nullptr;                 ///< [N, rank | shared keys]
  T* low_normed = nullptr;          ///< [N, rank]
  /// [N, queries | keys | values]. If ranks share sequences, Layer::exchange_projections() turns it
  /// into whole sequences of the rank's heads.
  T* qkv = nullptr;
  // Arrays of a gated delta net, which replace those of attention.
  T* mixed = nullptr;       ///< [N, DeltaShape::row()]
  T* channels = nullptr;    ///< [N, DeltaShape::channels()] after the convolution
  T* recurred = nullptr;    ///< [N, DeltaShape::values()]
  float* states = nullptr;  ///< DeltaShape::states()

  T* attention = nullptr;      ///< [N, A]
  T* attended = nullptr;       ///< like attention, by heads; only if ranks share sequences
  T* attention_out = nullptr;  ///< [N, H] before its norm, later its gradient
  T* middle = nullptr;         ///< [N, H] residual stream between attention and MLP
  T* norm2 = nullptr;          ///< [N, H] input of the MLP
  T* hidden = nullptr;         ///< [N, I] gelu's input, or 2 N I elements of gate and up
  T* activated = nullptr;      ///< [N, I], later its gradient
  T* mlp_out = nullptr;        ///< [N, H] before its norm, later its gradient
  T* dqkv = nullptr;           ///< like qkv or mixed, in the memory of hidden and activated
  T* gradient = nullptr;  ///< [N, H, A or values], of norm2, attention, then norm1; norm2's memory.
                          ///< Before that [N, expanded] or its gradient, if there are maps of
                          ///< low rank
  float* log_sums = nullptr;  ///< log-sums of attention
};

/// Rows [first, first + rows) of a layer and the intermediates of its MLP for these rows.
template <class T>
struct MlpChunk {
  std::size_t first = 0;
  std::size_t rows = 0;
  std::size_t width = 0;   ///< I of the layer or tile
  T* hidden = nullptr;     ///< like LayerMemory's, with `rows` instead of N
  T* activated = nullptr;  ///< like LayerMemory's
  T* mlp_out = nullptr;    ///< like LayerMemory's
};

}  // namespace ballast::model
