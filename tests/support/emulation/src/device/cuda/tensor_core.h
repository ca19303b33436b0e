#pragma once

// The compiler finds this file before the header of this name in src/ when tests compile kernels
// for the host.

#include <array>
#include <cstdint>
#include <cstring>

#include "ballast/core/dtype.h"

#include "tests/support/emulation/src/device/cuda/kernel_language.h"

namespace ballast::device {

/// Element `half` of a register with two bf16.
inline float bf16_of(std::uint32_t pair, unsigned half) {
  return to_float(Bf16{static_cast<std::uint16_t>(pair >> (16 * half))});
}

inline void multiply_add(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  test::emulation::need_capability(80, "a product of bf16");
  struct Fragments {
    std::uint32_t a[4];
    std::uint32_t b[2];
  } mine;
  std::memcpy(mine.a, a, sizeof a);
  std::memcpy(mine.b, b, sizeof b);
  test::emulation::exchange_all(kAllLanes, &mine, sizeof mine);
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned g = lane / 4;
  const unsigned t = lane % 4;
  const auto of = [](unsigned from) {
    return *static_cast<const Fragments*>(test::emulation::given_by(from));
  };
  std::array<Fragments, 4> upper;  // rows g: its lanes 4g .. 4g + 3
  for (unsigned i = 0; i < 4; ++i) upper[i] = of(4 * g + i);
  for (unsigned column = 0; column < 2; ++column) {
    std::array<Fragments, 4> right;
    for (unsigned i = 0; i < 4; ++i) right[i] = of(4 * (2 * t + column) + i);
    float factors[16];
    for (unsigned k = 0; k < 16; ++k) factors[k] = bf16_of(right[k % 8 / 2].b[k / 8], k % 2);
    for (unsigned half = 0; half < 2; ++half) {
      float& sum = d[2 * half + column];
      sum = test::emulation::sum_of_products(sum, [&](unsigned k) {
        return bf16_of(upper[k % 8 / 2].a[2 * (k / 8) + half], k % 2) * factors[k];
      });
    }
  }
}

inline void load_matrices_as(std::uint32_t (&r)[4], const void* row, bool transposed) {
  expect_aligned_to_16(row);
  test::emulation::exchange_all(kAllLanes, &row, sizeof row);
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned g = lane / 4;
  const unsigned t = lane % 4;
  for (unsigned m = 0; m < 4; ++m) {
    const auto element = [&](unsigned in_row, unsigned column) {
      const void* start = nullptr;
      std::memcpy(&start, test::emulation::given_by(8 * m + in_row), sizeof start);
      std::uint16_t bits = 0;
      std::memcpy(&bits, static_cast<const std::byte*>(start) + 2 * column, sizeof bits);
      return std::uint32_t{bits};
    };
    r[m] = transposed ? element(2 * t, g) | element(2 * t + 1, g) << 16U
                      : element(g, 2 * t) | element(g, 2 * t + 1) << 16U;
  }
  // The source may be overwritten as soon as the instruction is done.
  test::emulation::exchange_all(kAllLanes, nullptr, 0);
}
inline void load_matrices(std::uint32_t (&r)[4], const void* row) {
  load_matrices_as(r, row, false);
}
inline void load_matrices_transposed(std::uint32_t (&r)[4], const void* row) {
  load_matrices_as(r, row, true);
}

inline void copy_ahead(void* to_shared, const void* from, bool there = true) {
  test::emulation::start_copy(to_shared, from, there);
}
inline void end_copies() {
  test::emulation::end_copies();
}
template <int pending>
void await_copies() {
  test::emulation::await_copies(pending);
}

inline float power_of_two(float x) {
  return test::emulation::power_of_two(x);
}

}  // namespace ballast::device
