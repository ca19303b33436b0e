#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string_view>
#include <utility>

namespace ballast {

/// Philox4x32-10, a counter-based generator: the same (key, counter) gives the same four words on
/// every machine and in any order. Source: Salmon et al., "Parallel random numbers: as easy as 1,
/// 2, 3", SC 2011, section 4.
constexpr std::array<std::uint32_t, 4> philox(std::uint64_t key, std::uint64_t counter,
                                              std::uint64_t stream = 0) {
  std::array<std::uint32_t, 4> x = {
      static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32),
      static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32)};
  auto k0 = static_cast<std::uint32_t>(key);
  auto k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53U} * x[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57U} * x[2];
    x = {static_cast<std::uint32_t>(b >> 32) ^ x[1] ^ k0, static_cast<std::uint32_t>(b),
         static_cast<std::uint32_t>(a >> 32) ^ x[3] ^ k1, static_cast<std::uint32_t>(a)};
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return x;
}

/// FNV-1a, 64 bits: maps a text to the same number on every machine, for example the stream of a
/// named tensor. Source: Fowler, Noll, Vo; constants of the IETF draft draft-eastlake-fnv.
constexpr std::uint64_t fnv1a(std::string_view text) {
  std::uint64_t value = 0xcbf29ce484222325U;
  for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return value;
}

constexpr std::uint64_t random_u64(std::uint64_t key, std::uint64_t counter,
                                   std::uint64_t stream = 0) {
  const auto words = philox(key, counter, stream);
  return (std::uint64_t{words[1]} << 32) | words[0];
}

/// Returns position `index` of a permutation of [0, size) selected by `key`. A Feistel network
/// permutes the next power of 4; values outside are permuted again until they fall inside (Black &
/// Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, method 2). Takes at most 4 rounds
/// on average.
constexpr std::uint64_t permute(std::uint64_t index, std::uint64_t size, std::uint64_t key) {
  const auto half = std::max(1U, (static_cast<unsigned>(std::bit_width(size - 1)) + 1) / 2);
  const std::uint64_t mask = (std::uint64_t{1} << half) - 1;
  do {
    std::uint64_t left = index >> half;
    std::uint64_t right = index & mask;
    for (std::uint64_t round = 0; round < 8; ++round) {
      left ^= random_u64(key, right, round) & mask;
      std::swap(left, right);
    }
    index = (left << half) | right;
  } while (index >= size);
  return index;
}

/// A standard normal number from (key, counter, stream) by the Box-Muller transform.
inline double random_normal(std::uint64_t key, std::uint64_t counter, std::uint64_t stream = 0) {
  const auto words = philox(key, counter, stream);
  const double u1 = (static_cast<double>(words[0]) + 0.5) * 0x1p-32;
  const double u2 = (static_cast<double>(words[1]) + 0.5) * 0x1p-32;
  return std::sqrt(-2.0 * std::log(u1)) * std::cos(2.0 * std::numbers::pi * u2);
}

}  // namespace ballast
