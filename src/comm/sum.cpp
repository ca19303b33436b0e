#include "src/comm/sum.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace ballast::comm {
namespace {

/// Elements summed at a time. They fit in the L1 cache, and all sources are read before `out` is
/// written.
constexpr std::size_t kTile = 2048;

using Tile = std::array<float, kTile>;
template <class T>
using Stored = std::array<T, kTile>;

// memcpy to local arrays tells the compiler that the loops' operands do not overlap.
template <class T>
void load(Tile& to, const std::byte* from, std::size_t count) {
  Stored<T> values;
  std::memcpy(values.data(), from, count * sizeof(T));
  for (std::size_t i = 0; i < count; ++i) to[i] = to_float(values[i]);
}

template <class T>
void store(std::byte* to, const Tile& from, std::size_t count) {
  Stored<T> values;
  for (std::size_t i = 0; i < count; ++i) values[i] = from_float<T>(from[i]);
  std::memcpy(to, values.data(), count * sizeof(T));
}

void add(Tile& sum, const Tile& term, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) sum[i] += term[i];
}

template <class T>
void sum(std::span<const std::byte* const> sources, std::byte* out, std::size_t elements) {
  Tile sum;
  Tile term;
  for (std::size_t done = 0; done < elements; done += kTile) {
    const std::size_t count = std::min(kTile, elements - done);
    const std::size_t at = done * sizeof(T);
    load<T>(sum, sources[0] + at, count);
    for (const std::byte* source : sources.subspan(1)) {
      load<T>(term, source + at, count);
      add(sum, term, count);
    }
    store<T>(out + at, sum, count);
  }
}

}  // namespace

void sum_in_order(std::span<const std::byte* const> sources, std::byte* out, Bytes bytes,
                  DType type) {
  with_training_type(
      type, [&](auto value) { sum<decltype(value)>(sources, out, bytes / sizeof(value)); });
}

}  // namespace ballast::comm
