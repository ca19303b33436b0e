#pragma once

#include <cstring>
#include <tuple>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/sanitizers.h"
#if defined(BALLAST_EMULATED_GPU)
#include "tests/support/emulation/grid.h"
#endif

namespace ballast::test {

/// Compares bit for bit: a NaN equals itself, and zeros of both signs differ.
template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  static_assert(std::is_trivially_copyable_v<T>);
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}
template <class... T>
bool same_bits(const std::tuple<std::vector<T>...>& a, const std::tuple<std::vector<T>...>& b) {
  return std::apply(
      [&](const auto&... ones) {
        return std::apply([&](const auto&... others) { return (same_bits(ones, others) && ...); },
                          b);
      },
      a);
}

/// Calls `run`, which enqueues kernels and fetches their results: with emulated kernels once for
/// each order of their threads, or once if races are watched; on a GPU twice. Expects the same bits
/// from `run` each time and returns them (a vector, a tuple of vectors, or nothing).
template <class Run>
auto in_every_order(const Run& run) {
#if defined(BALLAST_EMULATED_GPU)
  using emulation::Order;
  const auto in = [&](Order order) {
    emulation::set_order(order);
    return run();
  };
  if (emulation::is_watched()) return in(Order::shuffled);
  constexpr Order first = Order::forward;
  constexpr Order others[] = {Order::backward, Order::shuffled};
#else
  const auto in = [&](int) { return run(); };
  constexpr int first = 0;
  constexpr int others[] = {1};
#endif
  if constexpr (std::is_void_v<decltype(run())>) {
    in(first);
    for (const auto order : others) in(order);
  } else {
    const auto found = in(first);
    if (kSanitized) return found;  // would take minutes
    for (const auto order : others) {
      EXPECT_TRUE(same_bits(found, in(order))) << "the order of threads changes the result";
    }
    return found;
  }
}

}  // namespace ballast::test
