#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "ballast/core/dtype.h"
#include "ballast/model/kernels.h"
#include "ballast/model/lora.h"
#include "ballast/model/packed_values.h"

#include "src/model/compute/formulas.h"
#include "src/model/compute/kernel_arguments.h"
#include "src/model/description/rotary_angles.h"

namespace ballast::model::cuda {

// Kernels over rows of activations. `T` is the training type, float or Bf16; values are computed
// and summed in fp32 with the formulas of src/model/compute/formulas.h. Matrices are row-major
// without gaps unless a stride (in elements) is given. Pointers are to device memory and aligned to
// 16 bytes. Widths, strides and sizes are multiples of 8 unless stated otherwise. Results depend
// only on the arguments: the extents fix the order of every sum. `partials` is scratch memory.
// Calls with an extent of 0 do nothing and return cudaSuccess.

struct Rows {
  std::size_t count = 0;  ///< less than 2^31
  std::size_t width = 0;  ///< less than 2^31
};

/// Places of rows in memory: row r is at r / groups * step + r % groups * width, so that it may be
/// a part of a longer row. Default: rows without gaps.
struct NormRows {
  std::size_t groups = 1;
  std::size_t x_step = 0;  ///< 0: groups * width
  std::size_t y_step = 0;  ///< for y, residual, dy and dx; 0: groups * width
};

/// y = residual (null: 0) + (x - mean) / deviation * weight + bias (null: 0). If neither `centred`
/// nor given a bias: RMSNorm, x / deviation * weight. `offset` is added to the weight. Sources: Ba
/// et al., "Layer normalization", 2016; Zhang & Sennrich, "Root mean square layer normalization",
/// 2019, equation 4.
template <class T>
cudaError_t norm(cudaStream_t stream, const T* x, const T* weight, const T* bias, float epsilon,
                 const T* residual, T* y, Rows rows, const NormRows& places = {},
                 float offset = 0.0F, bool centred = false);

/// dx = residual (null: 0) + gradient of x, given dy. Adds the gradients of the weights to
/// `weight_gradient` and `bias_gradient`, unless null. dx may be residual, dy or x itself. A norm
/// is a LayerNorm if `centred`, or if it has a bias gradient.
template <class T>
cudaError_t norm_backward(cudaStream_t stream, const T* x, const T* weight, const T* dy,
                          float epsilon, const T* residual, T* dx, float* weight_gradient,
                          float* bias_gradient, float* partials, Rows rows,
                          const NormRows& places = {}, float offset = 0.0F, bool centred = false);

/// Adds column sums of x to `gradient` [width]. Rows of x are `stride` apart; the width may be
/// anything up to the stride.
template <class T>
cudaError_t add_column_sums(cudaStream_t stream, const T* x, std::size_t stride, float* gradient,
                            float* partials, Rows rows);

/// Floats of `partials` that these kernels need for at most these rows and columns.
std::size_t partial_floats(Rows most);

/// Maximum number of groups of rows whose columns are summed separately: enough for the largest
/// GPUs, few enough that the partial sums are small compared with the rows. Only the extents
/// determine the groups and the order of every sum.
inline constexpr std::size_t kMaxGroups = 256;

/// Sums of columns by group of rows: [groups, width], or [groups, 2, width] for two gradients.
struct Partials {
  const float* sums = nullptr;
  std::size_t groups = 0;
  std::size_t width = 0;
  bool two = false;
};

/// Adds the sums over the groups to `gradient` [width] and `second` [width], unless null.
cudaError_t add_partials(cudaStream_t stream, const Partials& partials, float* gradient,
                         float* second);

/// y = f(x), for `size` elements. f is a form of GELU; otherwise cudaErrorInvalidValue.
template <class T>
cudaError_t activate(cudaStream_t stream, Activation f, const T* x, T* y, std::size_t size);
/// d = d * f'(x).
template <class T>
cudaError_t activate_backward(cudaStream_t stream, Activation f, const T* x, T* d,
                              std::size_t size);

/// x *= factor; any size, any alignment of elements.
template <class T>
cudaError_t scale(cudaStream_t stream, T* x, float factor, std::size_t size);
/// x *= the sum of the `addends`.
template <class T>
cudaError_t scale_by(cudaStream_t stream, const T* addends, std::size_t count, T* x,
                     std::size_t size);
/// y = x * (the mask's factors) (+ y).
template <class T>
cudaError_t drop(cudaStream_t stream, const DropoutMask& mask, const T* x, T* y, std::size_t size,
                 bool add_to_y);

/// Computes the norms and scales of an adapted map; see AdapterOps.
template <class T>
cudaError_t compute_dora_scales(cudaStream_t stream, const AdaptedRows<T>& rows, float* scales,
                                float* inverse_norms);
template <class T>
cudaError_t scale_columns(cudaStream_t stream, const ScaledColumns<T>& columns);
/// `partials`: as for add_column_sums().
template <class T>
cudaError_t add_column_products(cudaStream_t stream, const ColumnProducts<T>& columns,
                                float* gradient, float* partials);

/// y = `how` applied to gate and up, whose rows are `step` apart.
template <class T>
cudaError_t glu(cudaStream_t stream, const Gating& how, const T* gate, const T* up,
                std::size_t step, T* y, Rows rows);
/// Replaces gate and up by their gradients, given dy.
template <class T>
cudaError_t glu_backward(cudaStream_t stream, const Gating& how, T* gate, T* up, std::size_t step,
                         const T* dy, Rows rows);

/// Converts x to fp32, `size` elements.
template <class T>
cudaError_t widen(cudaStream_t stream, const T* x, float* y, std::size_t size);
/// y += x, `size` elements.
cudaError_t accumulate(cudaStream_t stream, const float* x, float* y, std::size_t size);

/// Rotary positions.
struct Rotation {
  std::size_t length = 0;
  /// Row r has position positions[r], or r % length if this is null.
  const std::int32_t* positions = nullptr;
  std::size_t heads = 0;  ///< number of heads to rotate, side by side from the start of a row
  std::size_t head_dim = 0;
  std::size_t half = 0;           ///< the first 2 * half values of a head rotate
  bool interleaved = false;       ///< see Rotary
  const float* cosine = nullptr;  ///< [length, half]
  const float* sine = nullptr;
  float direction = 1.0F;  ///< -1 for the backward pass
};
/// Rows of cosines and sines.
struct AngleRows {
  std::size_t count = 0;
  std::size_t length = 0;  ///< rows per sequence
  /// Row r has position positions[r], or r % length if this is null.
  const std::int32_t* positions = nullptr;
  /// True: rows have the frequencies of their documents. False: Rotary::frequencies.
  bool by_document = false;
};
/// Pairs of a head whose angles one kernel computes. Kernel arguments have at most 4 KiB, here two
/// frequencies per pair.
inline constexpr std::size_t kMaxPairs = 128;
/// Writes cosine and sine [rows, pairs] of position * frequency, times the factor, computed in
/// double and rounded once.
cudaError_t fill_angles(cudaStream_t stream, const Rotary& rotary, const AngleRows& rows,
                        float* cosine, float* sine);
/// Rotates x [rows.count, stride] in place. rows.width is heads * head_dim.
template <class T>
cudaError_t rotate(cudaStream_t stream, T* x, std::size_t stride, const Rotation& rotation,
                   Rows rows);

/// Groups of columns in rows, like Groups and GroupSteps.
struct CopiedGroups {
  std::size_t rows = 0;
  std::size_t count = 0;  ///< groups per row
  std::size_t width = 0;  ///< columns per group
  std::size_t zeros = 0;  ///< zeros written after each group
};
struct StepsOfGroups {
  std::size_t row = 0;
  std::size_t group = 0;
};
template <class T>
cudaError_t copy_groups(cudaStream_t stream, const CopiedGroups& groups, const T* from,
                        const StepsOfGroups& from_steps, T* to, const StepsOfGroups& to_steps);
/// Sums the groups of each row in order in fp32, rounded once.
template <class T>
cudaError_t sum_groups(cudaStream_t stream, const CopiedGroups& groups, const T* from,
                       const StepsOfGroups& steps, T* to, std::size_t to_row);

/// Copies rows of heads from one order to another. how.first and how.others are multiples of 8.
template <class T>
cudaError_t regroup(cudaStream_t stream, const Regrouping& how, const T* from, T* to);

// Kernels for the calls of Compute with the same names, which document the arguments. Conventions:
// rows.h, but sizes are arbitrary. `partial`: scratch memory, one GradientStats per kStatsChunk
// values.

/// Packs a gradient. Writes the statistics of the packed values to `stats` unless it is null; then
/// `partial` is not used. The arrays must not overlap. If there is a table, its width is a multiple
/// of 8, and so is its size.
template <class T>
cudaError_t pack_gradient(cudaStream_t stream, const UnpackedGradient& from, T* packed,
                          std::size_t size, GradientStats* partial, GradientStats* stats);

template <class T>
cudaError_t measure_gradient(cudaStream_t stream, const T* packed, std::size_t size,
                             GradientStats* partial, GradientStats* stats);

/// The bits equal the host device's (ballast/core/dtype.h).
template <class T>
cudaError_t quantize_weights(cudaStream_t stream, const T* weights, std::size_t blocks,
                             std::int8_t* codes, float* scales);
template <class T>
cudaError_t dequantize_weights(cudaStream_t stream, const std::int8_t* codes, const float* scales,
                               std::size_t blocks, T* weights);

/// Dequantises all elements of `matrix` (device memory, aligned to 64 bytes like `out`). The bits
/// equal the host device's (host/packing_ops.cpp), except payloads of NaN.
template <class T>
cudaError_t dequantize_base(cudaStream_t stream, const QuantizedMatrix& matrix, T* out);

/// Copies `size` bytes, a multiple of 16, within device memory.
cudaError_t copy_bytes(cudaStream_t stream, const std::byte* from, std::byte* to, std::size_t size);

// Kernels of values that layers share besides the residual stream, documented at LinkOps.
// Conventions: rows.h.

template <class T>
cudaError_t put_sums(cudaStream_t stream, const T* x, std::size_t step, Rows rows, bool adds,
                     float* sums);
template <class T>
cudaError_t add_sums(cudaStream_t stream, const float* sums, Rows rows, T* x, std::size_t step);
template <class T>
cudaError_t mix_rows(cudaStream_t stream, const TokenRows<const T>& rows, const TokenMix& how,
                     const T* x, std::size_t step, T* y);
template <class T>
cudaError_t mix_rows_backward(cudaStream_t stream, const TokenRows<const T>& dy,
                              const TokenMix& how, float* of_rows, T* dx, std::size_t step);

}  // namespace ballast::model::cuda
