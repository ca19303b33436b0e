#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "ballast/model/packed_values.h"

#include "src/model/host/kernel_tables.h"

namespace ballast::model {
namespace {

/// The gradient of one token's row, or of several with equal tokens.
struct TokenGradient {
  std::int32_t token = 0;
  const float* row = nullptr;
};

/// Returns the gradients by token, without those of `pad`, those of equal tokens in the order of
/// micro-batches and tokens.
std::vector<TokenGradient> by_token(std::span<const RowGradients> micro_batches, std::size_t width,
                                    std::optional<std::int32_t> pad) {
  std::vector<TokenGradient> sorted;
  for (const RowGradients& one : micro_batches) {
    for (std::size_t i = 0; i < one.tokens.size(); ++i) {
      if (one.tokens[i] == pad) continue;
      sorted.push_back({one.tokens[i], one.rows.data() + i * width});
    }
  }
  std::ranges::stable_sort(sorted, {}, &TokenGradient::token);
  return sorted;
}

template <class T>
GradientStats scatter(const std::vector<TokenGradient>& sorted, std::size_t width, T* packed) {
  const host::GradientKernels<T>& kernels = host::best_kernels<T>().gradients;
  const auto accumulate = host::best_kernels<float>().rows.accumulate;
  GradientStats stats;
  std::vector<float> sum(width);
  for (auto next = sorted.begin(); next != sorted.end();) {
    const std::int32_t token = next->token;
    std::copy_n(next->row, width, sum.begin());
    for (++next; next != sorted.end() && next->token == token; ++next) {
      accumulate(sum.data(), next->row, width);
    }
    kernels.pack(sum.data(), nullptr, packed + static_cast<std::size_t>(token) * width, width,
                 &stats.sum_of_squares, &stats.non_finite);
  }
  return stats;
}

}  // namespace

GradientStats scatter_rows(DType type, std::span<const RowGradients> micro_batches,
                           std::size_t width, HostBytes packed, std::optional<std::int32_t> pad) {
  std::memset(packed.data(), 0, packed.size());
  const std::vector<TokenGradient> sorted = by_token(micro_batches, width, pad);
  switch (type) {
    case DType::f32:
      return scatter(sorted, width, reinterpret_cast<float*>(packed.data()));
    case DType::bf16:
      return scatter(sorted, width, reinterpret_cast<Bf16*>(packed.data()));
    case DType::f16:
      return scatter(sorted, width, reinterpret_cast<F16*>(packed.data()));
  }
  return {};
}

}  // namespace ballast::model
