#pragma once

#include <cstddef>
#include <cstdint>

#include "src/model/host/kernels.h"

namespace ballast::model::host {

// What knows tokens, spread over the team. `width`: hidden_size; row i is at position i % `length`.

/// Throws Error(data) naming the first token outside [0, vocabulary).
void check_tokens(const std::int32_t* tokens, std::size_t count, std::size_t vocabulary);

/// out[i] = table[tokens[i]] (+ positions[i % length] where that is not null).
template <class T>
void embed(const RowKernels<T>& kernels, const T* table, const T* positions,
           const std::int32_t* tokens, std::size_t count, std::size_t length, std::size_t width,
           T* out);

/// Adds dy to the rows of the tokens, in token order, and of their positions unless null.
template <class T>
void embed_backward(const RowKernels<T>& kernels, const std::int32_t* tokens, std::size_t count,
                    std::size_t length, std::size_t width, const T* dy, float* table,
                    float* positions);

/// losses[r] = the cross-entropy of a row of logits, which its gradients replace, narrower, from
/// the row's start, where `scale` is not null. `stride`: floats from row to row.
template <class T>
void cross_entropy(const RowKernels<T>& kernels, float* logits, std::size_t rows,
                   std::size_t stride, std::size_t vocabulary, const std::int32_t* targets,
                   const float* scale, double* losses);

}  // namespace ballast::model::host
