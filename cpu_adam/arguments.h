#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "ballast/cpu_adam/optimizer.h"

#include "cpu_adam/variant.h"

namespace ballast::cpu_adam {

/// The scalars of an update in double, and as its kernels take them.
Scalars<double> exact_scalars(const Hyper& hyper);
Coefficients coefficients_of(const Hyper& hyper);

/// Sets the key of stochastic rounding for the elements whose number has these upper 32 bits.
void key_draws(Coefficients& coefficients, std::int64_t step, std::uint32_t upper_element);

/// Bytes of one element of each array; 0 for an array that is not used.
struct ElementSizes {
  std::size_t main, remainder_or_copy, first, second, gradient;
  bool loads_remainder;  ///< true for a remainder, false for a copy
};
ElementSizes sizes_of(Optimizer optimizer, Weights::Format weights, DType gradient,
                      Moments::Format moments);
/// Element sizes of `shard` for `optimizer`.
ElementSizes sizes_of(Optimizer optimizer, const Shard& shard);

/// Throws Error(state) when `shard` cannot be updated by `optimizer` (see Updater::step).
void require_complete(Optimizer optimizer, const Shard& shard);
/// Like the overload above, for a step, which accepts any empty shard.
void require_complete(const Hyper& hyper, const Shard& shard);

/// The format of the moments that `optimizer` keeps: without a first moment, bf16_first is f32.
Moments::Format format_of_moments(Optimizer optimizer, const Shard& shard);

/// Calls `piece(start, count)` for [start, end) of a shard, cut at element numbers that are
/// multiples of 2^32: a kernel receives only the lower 32 bits of an element's number.
void for_pieces(Elems first_element, Elems start, Elems end, const auto& piece) {
  constexpr Elems kLowerHalf = Elems{1} << 32;
  while (start < end) {
    const Elems left = kLowerHalf - (first_element + start) % kLowerHalf;
    const Elems count = std::min(end - start, left);
    piece(start, count);
    start += count;
  }
}

/// Streams::undecayed of the block of 8-bit moments whose first element has this number.
std::uint8_t undecayed_in_block(std::span<const ElementRange> undecayed, Elems element);

/// Calls `piece(start, count, undecayed)` for [start, end) of a shard, cut where weight decay
/// begins or ends. `undecayed` is 0 if all elements of the piece have weight decay and kUndecayed
/// if none has. With Codes a piece has whole blocks, and a block with both kinds of elements is a
/// separate piece with its Streams::undecayed.
inline constexpr std::uint8_t kUndecayed = 0xff;
void for_decays(const Shard& shard, Elems start, Elems end, const auto& piece) {
  static_assert(Codes::kBlock == 8 * Shard::kDecayStep);
  const bool blockwise = shard.moments.format == Moments::Format::blockwise8;
  const Elems unit = blockwise ? Codes::kBlock : 1;
  auto range = shard.undecayed.begin();
  while (start < end) {
    const Elems number = shard.first_element + start;
    while (range != shard.undecayed.end() && range->end <= number) ++range;
    const bool decays = range == shard.undecayed.end() || range->first > number;
    Elems count = end - start;
    if (range != shard.undecayed.end()) {
      const Elems same = (decays ? range->first : range->end) - number;
      if (same < count) count = same / unit * unit;
    }
    std::uint8_t undecayed = decays ? 0 : kUndecayed;
    if (count == 0) {
      count = std::min(unit, end - start);
      undecayed = undecayed_in_block(shard.undecayed, number);
    }
    piece(start, count, undecayed);
    start += count;
  }
}

/// Elements [start, start + count) of `shard` without the moments that `optimizer` does not keep.
/// With Codes, `start` is a multiple of Codes::kBlock.
Streams piece_of(Optimizer optimizer, const Shard& shard, Elems start, Elems count);

/// The arrays of `shard` for Updater::touch, from element `start` (a multiple of Codes::kBlock) on.
std::vector<TouchedArray> touched_arrays(Optimizer optimizer, const Shard& shard, Elems start);

}  // namespace ballast::cpu_adam
