#pragma once

// The compiler finds this file before the header of this name in src/ when tests compile kernels
// for the host. Products happen late or at random (Seeds::timing), so that data which changes too
// early shows.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ballast/core/dtype.h"

#include "src/device/cuda/shared_memory.h"
#include "tests/support/emulation/src/device/cuda/kernel_language.h"
#include "tests/support/emulation/src/device/cuda/tensor_core.h"

namespace ballast::device {

inline bool has_warpgroup_products() {
  return test::emulation::has_warpgroup_products();
}

struct SharedOperand {
  const Bf16* start;
  int panel_rows;

  /// The hardware computes an address in panels that are not swizzled, then swizzles its bits.
  [[nodiscard]] static float at(const Bf16* place) {
    auto address = reinterpret_cast<std::uintptr_t>(place);
    address ^= (address >> 7U & 7U) << 4U;
    Bf16 value;
    std::memcpy(&value, reinterpret_cast<const void*>(address), sizeof value);
    return to_float(value);
  }
  [[nodiscard]] float by_rows(int row, int k) const { return at(start + row * 64 + k); }
  [[nodiscard]] float by_columns(int k, int column) const {
    return at(start + column / 64 * panel_rows * 64 + k * 64 + column % 64);
  }
};

inline SharedOperand operand_by_rows(const Bf16* start) {
  return {start, 0};
}
inline SharedOperand operand_by_columns(const Bf16* start, int rows) {
  return {start, rows};
}

/// Adds products of `row` (0 or 8 after this lane's first one) to the lane's sums.
template <int kParts, class Left, class Right>
void add_to_lane(float (&d)[kParts][4], unsigned lane, const Left& left, const Right& right) {
  const auto g = static_cast<int>(lane / 4);
  const auto t = static_cast<int>(lane % 4);
  for (int n = 0; n < kParts; ++n) {
    for (int i = 0; i < 4; ++i) {
      d[n][i] = test::emulation::sum_of_products(
          d[n][i], [&](int k) { return left(g + i / 2 * 8, k) * right(k, 8 * n + 2 * t + i % 2); });
    }
  }
}

template <int kParts>
void start_product(float (&d)[kParts][4], SharedOperand a, SharedOperand b, bool add) {
  test::emulation::need_capability(90, "a product of a warpgroup");
  const unsigned thread = threadIdx.x;
  test::emulation::start_product([&d, a, b, add, thread] {
    const int first = static_cast<int>(thread / kWarp % 4) * 16;
    if (!add) std::memset(d, 0, sizeof d);
    add_to_lane(
        d, thread % kWarp, [&](int row, int k) { return a.by_rows(first + row, k); },
        [&](int k, int column) { return b.by_rows(column, k); });
  });
}

template <int kParts>
void start_product(float (&d)[kParts][4], const std::uint32_t (&a)[4], SharedOperand b) {
  test::emulation::need_capability(90, "a product of a warpgroup");
  struct Fragments {
    std::uint32_t a[4];
  } mine;
  std::memcpy(mine.a, a, sizeof a);
  test::emulation::exchange_all(kAllLanes, &mine, sizeof mine);
  const unsigned lane = threadIdx.x % kWarp;
  std::array<Fragments, 4> upper;  // rows lane / 4 and lane / 4 + 8
  for (unsigned i = 0; i < 4; ++i) {
    std::memcpy(&upper[i], test::emulation::given_by(lane / 4 * 4 + i), sizeof upper[i]);
  }
  test::emulation::start_product([&d, upper, b, lane] {
    const auto left = [&](int row, int k) {
      const std::uint32_t pair = upper[k % 8 / 2].a[2 * (k / 8) + row / 8];
      return bf16_of(pair, static_cast<unsigned>(k % 2));
    };
    add_to_lane(d, lane, left, [&](int k, int column) { return b.by_columns(k, column); });
  });
}

inline void begin_products() {}
inline void end_products() {
  test::emulation::end_products();
}
template <int pending>
void await_products() {
  test::emulation::await_products(pending);
}
template <int kParts>
void pin_sums(float (&)[kParts][4]) {}
inline void show_to_products() {
  test::emulation::show_to_products();
}

}  // namespace ballast::device
