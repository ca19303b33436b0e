#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/error.h"
#include "ballast/core/machine.h"
#include "ballast/model/attention.h"

#include "src/model/compute/formulas.h"
#include "src/model/compute/kernel_arguments.h"

namespace ballast::model::host {

/// The type in which values of the training type T are computed and summed.
template <class T>
using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;

/// The keys of a tile of scores: columns [begin, end). Each query sees those of `mask` (the mask of
/// its sequence).
struct KeyRange {
  std::size_t begin = 0;
  std::size_t end = 0;
  AttentionMask mask;
};

/// Kernels over rows of activations for one instruction set. They are single-threaded; callers
/// split the rows. `T` is the training type. Matrices are row-major [rows, width] without gaps
/// unless a stride (in elements) is given. `*_sum` arrays [width] are accumulated.
template <class T>
struct RowKernels {
  using A = Acc<T>;
  using Size = std::size_t;

  /// y = residual (null: 0) + (x - mean) / sqrt(variance + epsilon) * weight + bias (null: 0) per
  /// row. Not `centred`: RMSNorm, without mean and bias, with `offset` added to the weight. Source:
  /// Ba et al. 2016; Zhang & Sennrich 2019.
  void (*norm)(const T* x, const T* weight, const T* bias, A offset, A epsilon, const T* residual,
               T* y, Size rows, Size width, bool centred);
  /// dx = residual (null: 0) + gradient of x. dx may be residual, dy or x. `bias_sum` null:
  /// RMSNorm.
  void (*norm_backward)(const T* x, const T* weight, const T* dy, A offset, A epsilon,
                        const T* residual, T* dx, A* weight_sum, A* bias_sum, Size rows,
                        Size width);
  /// Kernels of one activation f.
  struct OfActivation {
    /// y = f(x).
    void (*activate)(const T* x, T* y, Size size);
    /// d *= f'(x); accumulates the column sums of the result.
    void (*activate_backward)(const T* x, T* d, A* column_sum, Size rows, Size width);
    /// y = f(gate) * up.
    void (*glu)(const T* gate, const T* up, T* y, Size size);
    /// Replaces gate and up by their gradients. `dy`: gradient of y.
    void (*glu_backward)(T* gate, T* up, const T* dy, Size size);
  };
  std::array<OfActivation, static_cast<Size>(Activation::last) + 1> activations;
  /// silu(gate) * up with the limit of a Gating.
  void (*limited_swiglu)(const T* gate, const T* up, T* y, Size size, A limit, A slope);
  void (*limited_swiglu_backward)(T* gate, T* up, const T* dy, Size size, A limit, A slope);
  /// Accumulates column sums.
  void (*column_sum)(const T* x, Size stride, A* sum, Size rows, Size width);
  /// Rotates the first 2 * half values of each of `heads` heads [head_dim] of each row in place, by
  /// the angles of the row's position. Row r has position positions[first + r], or (first + r) %
  /// length if `positions` is null. cosine and sine are [length, half]. `direction`: 1 forward, -1
  /// backward.
  void (*rope)(T* x, Size stride, Size first, Size rows, Size length, const std::int32_t* positions,
               Size heads, Size head_dim, Size half, const A* cosine, const A* sine, A direction);
  /// Variant for pairs of neighbours, see Rotary::interleaved.
  void (*interleaved_rope)(T* x, Size stride, Size first, Size rows, Size length,
                           const std::int32_t* positions, Size heads, Size head_dim, Size half,
                           const A* cosine, const A* sine, A direction);
  /// y = a + b.
  void (*add)(const T* a, const T* b, T* y, Size size);
  /// sum += x.
  void (*accumulate)(A* sum, const T* x, Size size);
  /// y = x * factor.
  void (*scale)(const T* x, A factor, T* y, Size size);
  /// sum += x * factor.
  void (*accumulate_scaled)(A* sum, const T* x, A factor, Size size);
  /// y = x.
  void (*widen)(const T* x, A* y, Size size);
  /// y = x, rounded; rows [width] with strides.
  void (*convert)(const A* x, Size x_stride, T* y, Size y_stride, Size rows, Size width);
  /// out[r] = sum over columns of a * b.
  void (*row_dot)(const T* a, Size a_stride, const T* b, Size b_stride, A* out, Size rows,
                  Size width);

  /// Causal softmax of a tile of scores: row r is query first + r; the keys that it does not see
  /// get probability 0. Overwrites `scores`. log_sum[r] = log of the sum of exp(scale * score).
  void (*attention_softmax)(A* scores, T* probabilities, Size stride, Size first, Size rows,
                            const KeyRange& keys, A scale, A* log_sum);
  /// x = soft_cap(x * scale, cap).
  void (*soft_cap)(A* x, Size size, A scale, A cap);
  /// Recomputes probabilities from log_sum, and the gradients of the unscaled scores: p * (dp -
  /// delta) * scale. With a `cap` above 0, `scores` are results of soft_cap().
  void (*attention_softmax_backward)(const A* scores, const A* dp, T* probabilities, T* dscores,
                                     Size stride, Size first, Size rows, const KeyRange& keys,
                                     A scale, A cap, const A* log_sum, const A* delta);
  /// Writes the sum of a part of a row of logits. `target` counts from the part's first logit;
  /// `size` or more: it is in another part.
  void (*sum_logits)(const A* logits, Size size, Size target, RowSum<A>* row);
  /// gradient = scale * (softmax - one-hot) of a part of a row, given the sum over the whole row;
  /// it may start where `logits` starts. With a `cap` above 0, `logits` are results of soft_cap(),
  /// and the gradient is that of its argument.
  void (*logit_gradients)(const A* logits, Size size, Size target, const RowSum<A>* row, A scale,
                          A cap, T* gradient);
};

/// Most taps of a convolution.
inline constexpr std::size_t kMaxTaps = 8;

/// Rows [begin, end) of a micro-batch that a convolution computes. `positions` [tokens]:
/// AttentionMask::positions, with sequences of `length` rows.
struct ConvolvedRows {
  std::size_t begin = 0;
  std::size_t end = 0;
  const std::int32_t* positions = nullptr;
  std::size_t length = 1;
  std::size_t taps = 0;
  bool biased = false;
};

/// Results of MixerKernels::chunk_scores() and chunk_decays(), matrices [chunk, chunk], and beta
/// [chunk].
struct ChunkScores {
  const float* decay = nullptr;
  const float* beta = nullptr;
  const float* keys = nullptr;
  const float* queries = nullptr;
  const float* system = nullptr;
};

/// Kernels of gated delta nets, short convolutions and gated attention. Chunks have
/// DeltaShape::kChunk rows.
template <class T>
struct MixerKernels {
  using A = Acc<T>;
  using Size = std::size_t;

  /// y [rows, width] = silu(convolution of x). x and y begin at the first row of the micro-batch.
  /// `weights` [taps, width]: the last tap belongs to the row itself.
  void (*convolve)(const ConvolvedRows& rows, const T* x, Size x_step, const A* weights, T* y,
                   Size width);
  /// Replaces dy by the gradient of x and adds the gradients of the weights to `sums` [taps,
  /// width], for `columns` of the `width` channels. `rows`: those of one sequence.
  void (*convolve_backward)(const ConvolvedRows& rows, const T* x, Size x_step, const A* weights,
                            T* dy, Size dy_step, A* sums, Size width, Size columns);
  /// y [rows, width] = C * (convolution of B * x), for rows [B | C | x]. `weights` [taps, width],
  /// followed by a row of biases if there are any.
  void (*gated_convolve)(const ConvolvedRows& rows, const T* x, Size x_step, const A* weights, T* y,
                         Size width);
  /// Writes dx for dy [rows, width], and adds the gradients of the weights and biases to `sums`,
  /// for `columns` of the `width` channels. `rows`: those of one sequence.
  void (*gated_convolve_backward)(const ConvolvedRows& rows, const T* x, Size x_step,
                                  const A* weights, const T* dy, T* dx, A* sums, Size width,
                                  Size columns);
  /// y = RMSNorm(x) * silu(gate), for `heads` heads of `width` values.
  void (*gated_norm)(const T* x, const T* gate, const T* weight, A epsilon, T* y, Size heads,
                     Size width);
  /// Replaces dy by the gradient of x.
  void (*gated_norm_backward)(const T* x, const T* gate, const T* weight, A epsilon, T* dy,
                              T* dgate, A* weight_sum, Size heads, Size width);
  /// y = x * sigmoid(gate).
  void (*sigmoid_gate)(const T* x, const T* gate, T* y, Size size);
  /// Replaces the gate and dy by the gradients of the gate and of x.
  void (*sigmoid_gate_backward)(const T* x, T* gate, T* dy, Size size);
  /// y = x * factor / sqrt(sum of squares + 1e-6).
  void (*unit_row)(const T* x, A factor, A* y, Size width);
  void (*unit_row_backward)(const T* x, A factor, const A* dy, T* dx, Size width);
  /// decay[i][j] = exp(sums[i] - sums[j]) for first[i] <= j <= i, else 0.
  void (*chunk_decays)(const float* sums, const std::int32_t* first, float* decay);
  /// keys *= decay, with zeros on the diagonal; queries *= decay; system = keys * beta per row.
  void (*chunk_scores)(const float* decay, const float* beta, float* keys, float* queries,
                       float* system);
  /// Solves (1 + system) y = x [chunk, width] in place, or with the transposed matrix if
  /// `flipped`. Reads elements below the diagonal.
  void (*chunk_solve)(const float* system, float* x, Size width, bool flipped);
  /// Replaces the gradients of `system` and `queries` by those of keys and queries before
  /// chunk_scores(). Writes the gradients of beta and adds those of `sums`.
  void (*chunk_scores_backward)(const ChunkScores& of, float* dsystem, float* dqueries,
                                float* dbeta, float* dsums);
};

/// Kernels over gradients.
template <class T>
struct GradientKernels {
  using Size = std::size_t;
  /// packed = gradient + tied (null: none), rounded to nearest even; adds to the sum of squares and
  /// to the count of the packed values that are not finite.
  void (*pack)(const float* gradient, const float* tied, T* packed, Size size,
               double* sum_of_squares, std::uint64_t* non_finite);
  /// Computes the statistics of packed values.
  void (*measure)(const T* packed, Size size, double* sum_of_squares, std::uint64_t* non_finite);
};

inline constexpr std::size_t kCodeBlock = WeightCodes::kBlock;

/// Encodes weights and decodes codes, for `blocks` * kCodeBlock elements; see WeightCodes.
template <class T>
struct CodeKernels {
  using Size = std::size_t;
  void (*encode)(const T* values, Size blocks, std::int8_t* codes, float* scales);
  /// values = code * scale, rounded to T (nearest even).
  void (*decode)(const std::int8_t* codes, const float* scales, Size blocks, T* values);
};

/// Kernels of one training type.
template <class T>
struct TypeKernels {
  RowKernels<T> rows;
  GradientKernels<T> gradients;
  CodeKernels<T> codes;
  MixerKernels<T> mixers;
};

/// Number of groups of four normal numbers per call of KernelTable::normals.
inline constexpr std::size_t kNormalGroups = 64;

/// Kernels of one instruction set.
struct KernelTable {
  Isa isa = Isa::scalar;
  /// Initial values (see model::initialize) of groups [group, group + kNormalGroups) of a tensor
  /// with this stream: out[4 i + k] is number k of group `group + i`, rounded to float. Values do
  /// not depend on the instruction set, except in groups where the kernel's error could change the
  /// rounding. The function stores the `i` of these groups in `doubtful` [kNormalGroups] and
  /// returns their number.
  std::size_t (*normals)(std::uint64_t seed, std::uint64_t stream, std::uint64_t group,
                         double stddev, float* out, std::size_t* doubtful);
  TypeKernels<float> f32;
  TypeKernels<Bf16> bf16;
  TypeKernels<F16> f16;
};

/// The kernels of the training type T.
template <class T>
const TypeKernels<T>& kernels_of(const KernelTable& table) {
  if constexpr (kTypeOf<T> == DType::f32) {
    return table.f32;
  } else if constexpr (kTypeOf<T> == DType::bf16) {
    return table.bf16;
  } else {
    return table.f16;
  }
}

/// Tables that are compiled in and supported by this CPU, slowest first. BALLAST_ISA_MASK (a name)
/// hides all faster ones.
std::vector<const KernelTable*> kernel_tables();

/// Returns the kernels of the fastest table.
template <class T>
const TypeKernels<T>& best_kernels() {
  const auto tables = kernel_tables();
  expects(!tables.empty(), "no kernels for this CPU");
  return kernels_of<T>(*tables.back());
}

}  // namespace ballast::model::host
