#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "ballast/core/random.h"
#include "ballast/model/kernels.h"

#include "src/model/compute/matrix.h"

namespace ballast::model {

/// Extents of a convolution over the rows of a micro-batch.
struct ConvolutionShape {
  std::size_t sequences = 1;
  std::size_t length = 1;  ///< rows per sequence
  std::size_t channels = 0;
  std::size_t taps = 0;    ///< rows that it reads for a row, including its own
  std::size_t x_step = 0;  ///< elements between rows of its input
  bool biased = false;     ///< each channel has a bias

  [[nodiscard]] constexpr std::size_t tokens() const { return sequences * length; }
  /// Parameters of a channel.
  [[nodiscard]] constexpr std::size_t parameters() const { return taps + (biased ? 1 : 0); }
};

/// Extents of a gated delta net (DeltaSpec). A row of its inputs is [queries | keys | values] of
/// all heads, the channels, followed by a gate per value of the results, and by `b` and `a` per
/// head of values.
struct DeltaShape {
  std::size_t sequences = 1;
  std::size_t length = 1;       ///< rows per sequence
  std::size_t key_heads = 0;    ///< heads of queries and of keys; 0: there is no delta net
  std::size_t value_heads = 0;  ///< a multiple of key_heads
  std::size_t key_width = 0;    ///< values of a head of queries or keys
  std::size_t value_width = 0;  ///< values of a head of values
  std::size_t taps = 0;         ///< rows that the convolution reads for a row, including its own
  float beta_factor = 1.0F;     ///< beta is this times a sigmoid

  static constexpr std::size_t kChunk = kDeltaChunk;
  /// Chunks per state that the forward pass keeps.
  static constexpr std::size_t kChunksOfState = 8;

  [[nodiscard]] constexpr std::size_t tokens() const { return sequences * length; }
  [[nodiscard]] constexpr std::size_t keys() const { return key_heads * key_width; }
  [[nodiscard]] constexpr std::size_t values() const { return value_heads * value_width; }
  [[nodiscard]] constexpr std::size_t channels() const { return 2 * keys() + values(); }
  /// Columns of a row of the inputs, and where its parts begin.
  [[nodiscard]] constexpr std::size_t row() const { return betas_at() + 2 * value_heads; }
  [[nodiscard]] constexpr std::size_t gates_at() const { return channels(); }
  [[nodiscard]] constexpr std::size_t betas_at() const { return channels() + values(); }
  [[nodiscard]] constexpr ConvolutionShape convolution() const {
    return {sequences, length, channels(), taps, row()};
  }
  [[nodiscard]] constexpr std::size_t chunks() const { return (length + kChunk - 1) / kChunk; }
  /// Elements of the state of one head.
  [[nodiscard]] constexpr std::size_t state() const { return key_width * value_width; }
  /// Number of states per head of a sequence that the forward pass keeps.
  [[nodiscard]] constexpr std::size_t kept_states() const {
    return (chunks() + kChunksOfState - 1) / kChunksOfState;
  }
  /// Elements of all kept states.
  [[nodiscard]] constexpr std::size_t states() const {
    return sequences * value_heads * kept_states() * state();
  }
};

/// Inputs of the recurrence of a gated delta net, for all rows of a micro-batch.
template <class T>
struct DeltaInputs {
  const T* channels = nullptr;  ///< [N, channels()], after the convolution
  const T* betas = nullptr;     ///< `b` and `a` of the first row; rows are `betas_step` apart
  std::size_t betas_step = 0;
  const T* decay = nullptr;  ///< A_log [value_heads]
  const T* shift = nullptr;  ///< dt_bias [value_heads]
  /// AttentionMask::positions.
  const std::int32_t* positions = nullptr;
};

/// Gradients of DeltaInputs. Those of `decay` and `shift` are added; null: not wanted.
template <class T>
struct DeltaGradients {
  T* channels = nullptr;  ///< rows are `step` apart
  T* betas = nullptr;     ///< rows are `step` apart
  std::size_t step = 0;
  float* decay = nullptr;
  float* shift = nullptr;
};

/// A causal convolution of each channel with its own weights. Rows before the document of a row
/// count as zeros.
template <class T>
struct Convolution {
  const T* weight = nullptr;  ///< [channels, taps]; the last one belongs to the row itself
  float* weight_gradient = nullptr;
  const std::int32_t* positions = nullptr;  ///< AttentionMask::positions
  ConvolutionShape shape;
  const T* bias = nullptr;  ///< [channels], if shape.biased
  float* bias_gradient = nullptr;
};

/// Selects the elements of a matrix that are dropped; the others are multiplied by `factor`, which
/// keeps the mean. An element's number in the whole matrix decides, so the mask is the same in the
/// forward and backward pass and for any chunks. Source: Srivastava et al., "Dropout: A simple way
/// to prevent neural networks from overfitting", JMLR 15, 2014, section 10.
struct DropoutMask {
  std::uint64_t key = 0;
  std::uint64_t stream = 0;
  std::uint64_t first = 0;      ///< number of the view's first element, a multiple of 4
  std::uint32_t threshold = 0;  ///< elements with random words below it are dropped
  float factor = 1.0F;

  /// `probability`: in (0, 1).
  static constexpr DropoutMask of(double probability, std::uint64_t key, std::uint64_t stream,
                                  std::uint64_t first) {
    return {key, stream, first, static_cast<std::uint32_t>(probability * 0x1p32),
            static_cast<float>(1.0 / (1.0 - probability))};
  }
  /// Factors of elements [4 group, 4 group + 4) of the view.
  [[nodiscard]] constexpr std::array<float, 4> factors(std::size_t group) const {
    const auto words = philox(key, first / 4 + group, stream);
    return {words[0] < threshold ? 0.0F : factor, words[1] < threshold ? 0.0F : factor,
            words[2] < threshold ? 0.0F : factor, words[3] < threshold ? 0.0F : factor};
  }
};

/// Tensors from which kernels compute the norms ||W + s B A|| of a map's outputs.
template <class T>
struct AdaptedRows {
  Linear<T> map;                  ///< W
  const T* b = nullptr;           ///< [out, rank]
  const T* magnitudes = nullptr;  ///< [out]
  const float* cross = nullptr;   ///< W A^T [out, rank]
  const float* gram = nullptr;    ///< A A^T [rank, rank]
  std::size_t rank = 0;
  float scale = 1.0F;  ///< s
};

/// The adapter's contribution to the squared norm of a row: 2 s b . (A w) + s^2 ||b A||^2 (arXiv
/// 2402.09353, equation 5, expanded). `b(k)`: element k of the row of B; `cross`: the row of W A^T.
template <class Row>
constexpr float added_square(const Row& b, const float* cross, const float* gram, std::size_t rank,
                             float scale) {
  float mixed = 0.0F;
  float square = 0.0F;
  for (std::size_t k = 0; k < rank; ++k) {
    float inner = 0.0F;
    for (std::size_t l = 0; l < rank; ++l) inner += gram[k * rank + l] * b(l);
    mixed += b(k) * cross[k];
    square += b(k) * inner;
  }
  return scale * (2.0F * mixed + scale * square);
}

/// y = residual + x * scales + bias by column, for arrays [rows, width]. Null scales are `factor`;
/// a null bias or residual is 0. y may be x.
template <class T>
struct ScaledColumns {
  const float* scales = nullptr;
  const T* x = nullptr;
  std::size_t x_step = 0;
  T* y = nullptr;
  std::size_t y_step = 0;  ///< stride of y and of the residual
  std::size_t rows = 0;
  std::size_t width = 0;
  const T* bias = nullptr;
  const T* residual = nullptr;
  float factor = 1.0F;
};

/// gradient[c] += factors[c] * sum over the rows r of x[r, c] y[r, c].
template <class T>
struct ColumnProducts {
  const T* x = nullptr;
  std::size_t x_step = 0;
  const T* y = nullptr;
  std::size_t y_step = 0;
  const float* factors = nullptr;
  std::size_t rows = 0;
  std::size_t width = 0;
};

/// Order of the rows of a sequence-parallel layer's queries, keys and values, or of its results of
/// attention.
enum class RowOrder : std::uint8_t {
  local,     ///< [sequences, length], the rank's rows with the columns of all heads
  by_slice,  ///< [slices, sequences, length], columns of one slice's heads: parts of an all-to-all
  by_heads   ///< [sequences, slices, length], columns of one slice's heads: whole sequences
};

/// Extents of a copy of all rows and columns from one order to another; one of the two is by_slice.
struct Regrouping {
  std::size_t slices = 1;
  std::size_t sequences = 1;
  std::size_t length = 1;  ///< rows per sequence and slice
  std::size_t first = 0;   ///< columns of one slice in the queries, or in the results of attention
  std::size_t others = 0;  ///< columns of one slice in the keys, and in the values
  RowOrder from = RowOrder::local;
  RowOrder to = RowOrder::by_slice;

  /// Rows of a slice's heads.
  [[nodiscard]] constexpr std::size_t rows() const { return slices * sequences * length; }
  /// Columns of a slice's heads.
  [[nodiscard]] constexpr std::size_t width() const { return first + 2 * others; }
  /// Returns the first column of the queries, keys or values that `column` belongs to.
  [[nodiscard]] constexpr std::size_t group_of(std::size_t column) const {
    if (column < first) return 0;
    return column < first + others ? first : first + others;
  }
  /// Returns the offset in `order`, in elements, of `column` of the row that is row number `row` in
  /// the order by_slice.
  [[nodiscard]] constexpr std::size_t at(RowOrder order, std::size_t row,
                                         std::size_t column) const {
    if (order == RowOrder::by_slice) return row * width() + column;
    const std::size_t slice = row / (sequences * length);
    const std::size_t local = row % (sequences * length);
    if (order == RowOrder::by_heads) {
      return ((local / length * slices + slice) * length + local % length) * width() + column;
    }
    const std::size_t begin = group_of(column);
    const std::size_t wide = begin == 0 ? first : others;
    return (local * width() + begin) * slices + slice * wide + column - begin;
  }
};

/// Tokens of a micro-batch [N], the position of each in its document (null: in its sequence), and
/// for gradients its sum row, or kNoSumRow as -1 for a token that adds nothing.
struct Ids {
  const std::int32_t* tokens = nullptr;
  const std::int32_t* positions = nullptr;
  const std::int32_t* sum_rows = nullptr;
};

/// Tables of the embedding or of one of its tiles, or their gradients. Rows are hidden_size wide.
/// Token rows are multiplied by `scale`, which is 1 if there are positions.
template <class T>
struct Embedding {
  /// Rows of the tokens [first, first + size); a gradient has the sum rows of the tokens.
  T* tokens = nullptr;
  T* positions = nullptr;  ///< [>= length], or null
  float scale = 1.0F;
  std::size_t first = 0;
  std::size_t size = 0;
  /// True for a vocabulary tile, which writes only rows whose token it contains. The last tile adds
  /// the positions to all.
  bool tile = false;
  /// True for the first tile of a tensor place: outputs of all other tokens become -0.0, which
  /// changes no value that is added to it.
  bool begins = false;
};

/// Marks a row of a table without a sum row.
inline constexpr std::uint32_t kNoSumRow = 0xFFFFFFFFU;

/// The gradient of a block before it is packed: of its first `table` elements by rows of the table,
/// then of the rest.
struct UnpackedGradient {
  const float* sum_rows = nullptr;            ///< [sum rows, width]
  const std::uint32_t* sum_row_of = nullptr;  ///< [rows], or kNoSumRow
  std::size_t rows = 0;
  std::size_t width = 0;
  std::size_t table = 0;  ///< rows and padding
  const float* rest = nullptr;
  const float* tied = nullptr;  ///< added to the first `tied_size` elements of the table
  std::size_t tied_size = 0;
};

/// A row per token: of a table, or the gradient of what they are mixed to.
template <class T>
struct TokenRows {
  T* rows = nullptr;
  std::size_t size = 0;   ///< tokens
  std::size_t width = 0;  ///< columns
};
/// Factors of LinkOps: of a table's row, and of its sum with another row.
struct TokenMix {
  float scale = 1.0F;
  float factor = 1.0F;
};

}  // namespace ballast::model
