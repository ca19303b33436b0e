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

/// Sum of terms of type A, after a first one of type T if it is not null.
template <class A, class T>
void add_terms(const std::byte* first, std::span<const std::byte* const> sources, std::byte* out,
               std::size_t elements) {
  Tile sum;
  Tile term;
  for (std::size_t done = 0; done < elements; done += kTile) {
    const std::size_t count = std::min(kTile, elements - done);
    if (first != nullptr) {
      load<T>(sum, first + done * sizeof(T), count);
    } else {
      load<A>(sum, sources[0] + done * sizeof(A), count);
    }
    for (const std::byte* source : sources.subspan(first == nullptr ? 1 : 0)) {
      load<A>(term, source + done * sizeof(A), count);
      add(sum, term, count);
    }
    store<T>(out + done * sizeof(T), sum, count);
  }
}

}  // namespace

void add_in_order(const std::byte* first, std::span<const std::byte* const> sources, std::byte* out,
                  std::uint64_t elements, DType term_type, DType type) {
  with_training_type(type, [&](auto value) {
    using T = decltype(value);
    if (term_type == DType::f32) return add_terms<float, T>(first, sources, out, elements);
    add_terms<T, T>(first, sources, out, elements);
  });
}

void sum_in_order(std::span<const std::byte* const> sources, std::byte* out, Bytes bytes,
                  DType type) {
  add_in_order(nullptr, sources, out, bytes / size_of(type), type, type);
}

}  // namespace ballast::comm
