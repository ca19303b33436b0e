#include "src/model/host/tokens.h"

#include <cstring>

#include <fmt/format.h>

#include "ballast/core/error.h"

#include "src/model/host/team.h"

namespace ballast::model::host {
namespace {

/// Columns of the embedding that a thread takes: a cache line of fp32.
constexpr std::size_t kColumns = 16;

}  // namespace

void check_tokens(const std::int32_t* tokens, std::size_t count, std::size_t vocabulary) {
  for (std::size_t i = 0; i < count; ++i) {
    if (tokens[i] >= 0 && static_cast<std::size_t>(tokens[i]) < vocabulary) continue;
    throw Error(ErrorCategory::data,
                fmt::format("token {} of the micro-batch is {}, but model.vocab_size is {}", i,
                            tokens[i], vocabulary));
  }
}

template <class T>
void embed(const RowKernels<T>& kernels, const T* table, const T* positions,
           const std::int32_t* tokens, std::size_t count, std::size_t length, std::size_t width,
           T* out) {
  split(count, 1, [&](Range rows) {
    for (std::size_t i = rows.begin; i < rows.end; ++i) {
      const T* const row = table + static_cast<std::size_t>(tokens[i]) * width;
      if (positions == nullptr) {
        std::memcpy(out + i * width, row, width * sizeof(T));
      } else {
        kernels.add(row, positions + i % length * width, out + i * width, width);
      }
    }
  });
}

/// Threads share the columns, so that each sum runs in token order.
template <class T>
void embed_backward(const RowKernels<T>& kernels, const std::int32_t* tokens, std::size_t count,
                    std::size_t length, std::size_t width, const T* dy, float* table,
                    float* positions) {
  split(width, kColumns, [&](Range columns) {
    for (std::size_t i = 0; i < count; ++i) {
      const T* const from = dy + i * width + columns.begin;
      const std::size_t row = static_cast<std::size_t>(tokens[i]) * width;
      kernels.accumulate(table + row + columns.begin, from, columns.size());
      if (positions == nullptr) continue;
      kernels.accumulate(positions + i % length * width + columns.begin, from, columns.size());
    }
  });
}

template <class T>
void cross_entropy(const RowKernels<T>& kernels, float* logits, std::size_t rows,
                   std::size_t stride, std::size_t vocabulary, const std::int32_t* targets,
                   const float* scale, double* losses) {
  split(rows, 1, [&](Range r) {
    for (std::size_t i = r.begin; i < r.end; ++i) {
      float* const row = logits + i * stride;
      T* const gradient = scale == nullptr ? nullptr : reinterpret_cast<T*>(row);
      losses[i] = kernels.cross_entropy(row, vocabulary, static_cast<std::size_t>(targets[i]),
                                        scale == nullptr ? 0.0F : *scale, gradient);
    }
  });
}

template void embed(const RowKernels<float>&, const float*, const float*, const std::int32_t*,
                    std::size_t, std::size_t, std::size_t, float*);
template void embed(const RowKernels<Bf16>&, const Bf16*, const Bf16*, const std::int32_t*,
                    std::size_t, std::size_t, std::size_t, Bf16*);
template void embed_backward(const RowKernels<float>&, const std::int32_t*, std::size_t,
                             std::size_t, std::size_t, const float*, float*, float*);
template void embed_backward(const RowKernels<Bf16>&, const std::int32_t*, std::size_t, std::size_t,
                             std::size_t, const Bf16*, float*, float*);
template void cross_entropy(const RowKernels<float>&, float*, std::size_t, std::size_t, std::size_t,
                            const std::int32_t*, const float*, double*);
template void cross_entropy(const RowKernels<Bf16>&, float*, std::size_t, std::size_t, std::size_t,
                            const std::int32_t*, const float*, double*);

}  // namespace ballast::model::host
