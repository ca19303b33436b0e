#pragma once

#include <cstdint>

namespace ballast::data {

/// Position `index` of a permutation of [0, size) that `key` chooses. A Feistel network permutes
/// the next power of 4; values outside are permuted again until they fall inside (Black & Rogaway,
/// "Ciphers with arbitrary finite domains", CT-RSA 2002, method 2). At most 4 tries on average.
std::uint64_t permute(std::uint64_t index, std::uint64_t size, std::uint64_t key);

/// The key of the order of epoch `epoch`: it must not repeat the numbers of another use of `seed`.
std::uint64_t epoch_key(std::uint64_t seed, std::uint64_t epoch);

}  // namespace ballast::data
