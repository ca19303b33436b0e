#include "src/comm/sum.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "ballast/core/error.h"

namespace ballast::comm {
namespace {

/// Elements summed at a time. They fit the L1 cache, and all sources are read before `out` is
/// written.
constexpr std::size_t kTile = 2048;

using Tile = std::array<float, kTile>;
using Bf16Tile = std::array<std::uint16_t, kTile>;

// memcpy into local arrays tells the compiler that the loops' operands do not overlap.
void load(Tile& to, const std::byte* from, std::size_t count) {
  std::memcpy(to.data(), from, count * sizeof(float));
}

void load_bf16(Tile& to, const std::byte* from, std::size_t count) {
  Bf16Tile bits;
  std::memcpy(bits.data(), from, count * sizeof(std::uint16_t));
  for (std::size_t i = 0; i < count; ++i) to[i] = to_float(Bf16{bits[i]});
}

void store_bf16(std::byte* to, const Tile& from, std::size_t count) {
  Bf16Tile bits;
  for (std::size_t i = 0; i < count; ++i) bits[i] = to_bf16(from[i]).bits;
  std::memcpy(to, bits.data(), count * sizeof(std::uint16_t));
}

void add(Tile& sum, const Tile& term, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) sum[i] += term[i];
}

}  // namespace

void sum_in_order(std::span<const std::byte* const> sources, std::byte* out, Bytes bytes,
                  DType type) {
  expects(type == DType::f32 || type == DType::bf16, "sums over ranks need type f32 or bf16");
  const auto load_tile = type == DType::f32 ? load : load_bf16;
  Tile sum;
  Tile term;
  const std::size_t elements = bytes / size_of(type);
  for (std::size_t done = 0; done < elements; done += kTile) {
    const std::size_t count = std::min(kTile, elements - done);
    const std::size_t at = done * size_of(type);
    load_tile(sum, sources[0] + at, count);
    for (const std::byte* source : sources.subspan(1)) {
      load_tile(term, source + at, count);
      add(sum, term, count);
    }
    if (type == DType::f32) {
      std::memcpy(out + at, sum.data(), count * sizeof(float));
    } else {
      store_bf16(out + at, sum, count);
    }
  }
}

}  // namespace ballast::comm
