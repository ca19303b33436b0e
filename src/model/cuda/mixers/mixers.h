#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

#include "ballast/core/memory.h"

#include "src/model/compute/kernel_arguments.h"

namespace ballast::model::cuda {

// Kernels of gated delta nets, short convolutions and gated attention. Arguments as for MixerOps;
// conventions: rows.h. Widths of heads and rows of inputs (DeltaShape::row()) are multiples of 8.

/// Most values of a head, and most rows that the convolution reads for a row.
inline constexpr std::size_t kWidestDeltaHead = 256;
inline constexpr std::size_t kMaxConvolutionTaps = 8;

template <class T>
cudaError_t convolve(cudaStream_t stream, const Convolution<T>& how, const T* x, T* y);
/// `scratch`: convolution_scratch_bytes().
template <class T>
cudaError_t convolve_backward(cudaStream_t stream, const Convolution<T>& how, const T* x, T* dy,
                              std::byte* scratch);
std::size_t convolution_scratch_bytes(const ConvolutionShape& shape);
template <class T>
cudaError_t gated_convolve(cudaStream_t stream, const Convolution<T>& how, const T* x, T* y);
/// `scratch`: convolution_scratch_bytes().
template <class T>
cudaError_t gated_convolve_backward(cudaStream_t stream, const Convolution<T>& how, const T* x,
                                    const T* dy, T* dx, std::byte* scratch);

/// Weights of a gated norm, and the gradient that the backward pass adds to (null: not wanted).
template <class T>
struct GatedNorm {
  const T* weight = nullptr;
  float* weight_gradient = nullptr;
  float epsilon = 0.0F;
};
template <class T>
cudaError_t gated_norm(cudaStream_t stream, const DeltaShape& shape, const GatedNorm<T>& norm,
                       const T* x, const T* gate, T* y);
/// `partials`: gated_norm_partials() floats of scratch memory.
template <class T>
cudaError_t gated_norm_backward(cudaStream_t stream, const DeltaShape& shape,
                                const GatedNorm<T>& norm, const T* x, const T* gate, T* dy,
                                T* dgate, float* partials);
std::size_t gated_norm_partials(const DeltaShape& shape);

/// Rows of attention's results and of their gates.
struct GatedRows {
  std::size_t count = 0;
  std::size_t width = 0;
  std::size_t gate_step = 0;
};
template <class T>
cudaError_t sigmoid_gate(cudaStream_t stream, const GatedRows& rows, const T* x, const T* gate,
                         T* y);
template <class T>
cudaError_t sigmoid_gate_backward(cudaStream_t stream, const GatedRows& rows, const T* x, T* gate,
                                  T* dy);

/// Intermediates of the recurrence in fp32 for the chunks between two kept states. A unit is one
/// chunk of one head of one sequence.
struct DeltaScratch {
  struct Gates;               // delta_chunks.h
  float* rows = nullptr;      ///< [units of key heads, 2, chunk, key_width]: keys, then queries
  Gates* gates = nullptr;     ///< [units]
  float* inverse = nullptr;   ///< [units, chunk, chunk] of the triangular system
  float* queries = nullptr;   ///< [units, chunk, chunk] decayed products of queries with keys
  float* keys = nullptr;      ///< [units, chunk, chunk] decayed products of keys with keys
  float* states = nullptr;    ///< [units, state()] before the chunks
  float* written = nullptr;   ///< [units, chunk, value_width]: updates of the states
  float* dstate = nullptr;    ///< [heads, state()]: gradient that continues to earlier chunks
  float* dstates = nullptr;   ///< [units, state()]: gradients of the states after the chunks
  float* dwritten = nullptr;  ///< [units, chunk, value_width]
  float* drows = nullptr;     ///< [units, 2, chunk, key_width]
  double* sums = nullptr;     ///< [2, all chunks, heads]: gradients of decay and shift

  /// Takes the memory for `sequences` sequences at once.
  static DeltaScratch take(Bump& bump, const DeltaShape& shape, std::size_t sequences);
};
/// Bytes of scratch memory of the recurrence. Sequences are processed in turns if all of them need
/// too much.
std::size_t delta_scratch_bytes(const DeltaShape& shape);

/// The recurrence; see host::DeltaRule. One block computes a chunk, or some columns of the values
/// of one head over the chunks between two kept states. No sum uses atomics.
template <class T>
cudaError_t recur(cudaStream_t stream, const DeltaShape& shape, const DeltaInputs<T>& in, T* out,
                  float* states, std::byte* scratch);
template <class T>
cudaError_t recur_backward(cudaStream_t stream, const DeltaShape& shape, const DeltaInputs<T>& in,
                           const float* states, const T* dout, const DeltaGradients<T>& to,
                           std::byte* scratch);

}  // namespace ballast::model::cuda
