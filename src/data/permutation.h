#pragma once

#include <cstdint>

namespace ballast::data {

/// Returns position `index` of a permutation of [0, size) selected by `key`. A Feistel network
/// permutes the next power of 4; values outside are permuted again until they fall inside (Black &
/// Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, method 2). Takes at most 4 rounds
/// on average.
std::uint64_t permute(std::uint64_t index, std::uint64_t size, std::uint64_t key);

/// Returns the key for the order of epoch `epoch`, distinct from all other uses of `seed`.
std::uint64_t epoch_key(std::uint64_t seed, std::uint64_t epoch);

}  // namespace ballast::data
