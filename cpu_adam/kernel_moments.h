#pragma once

#include <cstddef>
#include <cstdint>

#include "ballast/core/units.h"

#include "cpu_adam/kernel_codes.h"
#include "cpu_adam/variant.h"

/// Compressed moments of any optimizer, tile by tile: expand to floats in the first-level cache,
/// update with a fused kernel, compress. kernel_adamw.h has a faster way for AdamW.
namespace ballast::cpu_adam {
namespace {

/// A moment of a tile in floats, expanded from codes.
template <class Lanes, class Kind>
struct BlockwiseTile {
  alignas(kCacheLine) float values[kTile];

  void expand(const std::uint8_t* codes, std::uint32_t exponent) {
    if constexpr (Lanes::kWidth == 1) {
      for (std::size_t i = 0; i < kTile; ++i) {
        values[i] = expand_code<Lanes, Kind>(codes[i], code_base<Kind>(exponent));
      }
    } else {
      const auto base = base_of_halves<Lanes, Kind>(exponent);
      for (std::size_t i = 0; i < kTile; i += 2 * Lanes::kWidth) {
        Pair<Lanes> pair = expand_codes<Lanes, Kind>(codes + i, base);
        Lanes::join(pair.even, pair.odd);
        Lanes::store(values + i, pair.even);
        Lanes::store(values + i + Lanes::kWidth, pair.odd);
      }
    }
  }
  /// Finds the shared exponent and stores it, unless the optimizer has no such moment. Separates
  /// the values into pairs of vectors.
  void prepare(std::uint8_t* exponent) {
    if (exponent == nullptr) return;
    LargestMagnitude<Lanes> largest;
    for (std::size_t i = 0; i < kTile; i += 2 * Lanes::kWidth) {
      Pair<Lanes> pair = {Lanes::load(values + i), Lanes::load(values + i + Lanes::kWidth)};
      largest.add(pair.even);
      largest.add(pair.odd);
      Lanes::separate(pair.even, pair.odd);
      Lanes::store(values + i, pair.even);
      Lanes::store(values + i + Lanes::kWidth, pair.odd);
    }
    *exponent = static_cast<std::uint8_t>(largest.shared_exponent());
  }
};

/// A moment of a tile in floats, expanded from and rounded to bf16.
template <class Lanes>
struct Bf16Tile {
  alignas(kCacheLine) float values[kTile];

  void expand(const std::uint16_t* from, std::size_t size) {
    std::uint16_t padded[kTile] = {};
    if (size < kTile) {
      __builtin_memcpy(padded, from, size * sizeof *from);
      from = padded;
    }
    for (std::size_t i = 0; i < kTile; i += Lanes::kWidth) {
      Lanes::store(values + i, Lanes::number_of(Lanes::widen_upper(from + i)));
    }
  }
  void compress(std::uint16_t* to, std::size_t size, const std::uint32_t (&key)[2],
                std::uint32_t element) const {
    std::uint16_t padded[kTile];
    std::uint16_t* target = size < kTile ? padded : to;
    for (std::size_t i = 0; i < kTile; i += Lanes::kWidth) {
      const auto random = draw<Lanes>(key, element + static_cast<std::uint32_t>(i));
      const auto rounded = round_to_bf16<Lanes>(Lanes::load(values + i), random);
      Lanes::narrow_upper(target + i, rounded);
    }
    if (size < kTile) __builtin_memcpy(to, padded, size * sizeof *to);
  }
};

inline void* forward(void* array, std::size_t bytes) {
  return array == nullptr ? nullptr : static_cast<std::byte*>(array) + bytes;
}

/// Weights and gradient of elements [start, start + size) of `all`. The caller sets the moments.
inline Streams tile_of(const Streams& all, std::size_t start, std::size_t size) {
  Streams tile = all;
  tile.main = forward(all.main, start * all.main_bytes);
  tile.remainder_or_copy = forward(all.remainder_or_copy, start * all.remainder_or_copy_bytes);
  tile.gradient = static_cast<const std::byte*>(all.gradient) + start * all.gradient_bytes;
  tile.size = size;
  tile.element = all.element + static_cast<std::uint32_t>(start);
  return tile;
}

/// Elements [start, start + size) of `all` with 8-bit moments. `start` is that of a block.
inline Streams block_of(const Streams& all, std::size_t start, std::size_t size) {
  Streams block = tile_of(all, start, size);
  block.first = forward(all.first, start);
  block.second = forward(all.second, start);
  if (all.first_exponents != nullptr) block.first_exponents += start / kTile;
  if (all.second_exponents != nullptr) block.second_exponents += start / kTile;
  return block;
}

/// Updates a tile with fp32 moments, some of whose elements have no weight decay.
inline void run_mixed(FusedKernel fused, const Coefficients& k, const Streams& tile) noexcept {
  constexpr std::size_t kStep = Shard::kDecayStep;
  const auto decays = [&](std::size_t at) { return ((tile.undecayed >> (at / kStep)) & 1U) == 0; };
  for (std::size_t start = 0; start < tile.size;) {
    std::size_t end = start + kStep;
    while (end < tile.size && decays(end) == decays(start)) end += kStep;
    if (end > tile.size) end = tile.size;
    Streams part = tile_of(tile, start, end - start);
    part.first = forward(tile.first, start * sizeof(float));
    part.second = forward(tile.second, start * sizeof(float));
    fused(decays(start) ? k : without_decay(k), part);
    start = end;
  }
}

template <class Lanes>
void run_bf16_first(FusedKernel fused, const Coefficients& k, const Streams& s) noexcept {
  Bf16Tile<Lanes> first;
  for (std::size_t start = 0; start < s.size; start += kTile) {
    const std::size_t size = s.size - start < kTile ? s.size - start : kTile;
    Streams tile = tile_of(s, start, size);
    auto* stored = static_cast<std::uint16_t*>(s.first) + start;
    first.expand(stored, size);
    tile.first = first.values;
    tile.second = forward(s.second, start * sizeof(float));
    fused(k, tile);
    first.compress(stored, size, k.draw_key, tile.element);
  }
}

/// The codes of a block, in a buffer if the shard ends within it. Null if the optimizer has no such
/// moment.
class CodesOfTile {
 public:
  CodesOfTile(void* codes, std::size_t size)
      : codes_(static_cast<std::uint8_t*>(codes)), size_(size) {}

  [[nodiscard]] std::uint8_t* block() { return in_buffer() ? buffer_ : codes_; }
  [[nodiscard]] const std::uint8_t* load() {
    if (in_buffer()) {
      __builtin_memset(buffer_ + size_, 0, kTile - size_);
      __builtin_memcpy(buffer_, codes_, size_);
    }
    return block();
  }
  void store() const {
    if (in_buffer()) __builtin_memcpy(codes_, buffer_, size_);
  }

 private:
  [[nodiscard]] bool in_buffer() const { return codes_ != nullptr && size_ < kTile; }

  std::uint8_t* codes_;
  std::size_t size_;
  std::uint8_t buffer_[kTile];
};

template <class Lanes>
void run_blockwise8(FusedKernel fused, const Coefficients& k, const Streams& s) noexcept {
  BlockwiseTile<Lanes, SignedCodes> first;
  BlockwiseTile<Lanes, UnsignedCodes> second;
  const DrawConstants<Lanes> rounding(k.draw_key);
  rounding.keep_in_memory();
  for (std::size_t start = 0; start < s.size; start += kTile) {
    const std::size_t size = s.size - start < kTile ? s.size - start : kTile;
    Streams block = block_of(s, start, size);
    CodesOfTile first_codes(block.first, size);
    CodesOfTile second_codes(block.second, size);
    if (block.first != nullptr) first.expand(first_codes.load(), *block.first_exponents);
    if (block.second != nullptr) second.expand(second_codes.load(), *block.second_exponents);
    Streams tile = block;
    tile.first = first.values;
    tile.second = second.values;
    if (s.undecayed == 0) {
      fused(k, tile);
    } else {
      run_mixed(fused, k, tile);
    }
    first.prepare(block.first_exponents);
    second.prepare(block.second_exponents);
    block.first = first_codes.block();
    block.second = second_codes.block();
    BlockCompressor<Lanes>(rounding, block, first.values, second.values).run([](std::size_t) {});
    first_codes.store();
    second_codes.store();
  }
}

}  // namespace
}  // namespace ballast::cpu_adam
