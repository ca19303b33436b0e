#pragma once

#include <cstddef>
#include <cstdint>

#include "ballast/core/units.h"

#include "cpu_adam/kernel_formats.h"
#include "cpu_adam/variant.h"

namespace ballast::cpu_adam {
namespace {

/// Loads and stores the cache lines of [from, from + bytes) almost without computing: loaded values
/// are stored unchanged; an array that is only stored becomes zero.
template <class Lanes, bool kLoads, bool kStores, bool kPrefetches, bool kStreams>
void touch_lines(std::byte* from, std::size_t bytes, std::size_t ahead,
                 typename Lanes::Bits unchanged, typename Lanes::Bits& seen) {
  constexpr std::size_t kStep = Lanes::kWidth * sizeof(std::uint32_t);
  for (std::size_t at = 0; at + kCacheLine <= bytes; at += kCacheLine) {
    if constexpr (kPrefetches) __builtin_prefetch(from + at + ahead);
    for (std::size_t i = at; i < at + kCacheLine; i += kStep) {
      auto* lanes = reinterpret_cast<float*>(from + i);
      const auto value = kLoads ? Lanes::bits_of(Lanes::load(lanes)) : unchanged;
      if constexpr (!kStores) {
        seen = seen | value;
      } else if constexpr (kStreams) {
        Lanes::stream(lanes, Lanes::number_of(value | unchanged));
      } else {
        Lanes::store(lanes, Lanes::number_of(value | unchanged));
      }
    }
  }
}

template <class Lanes, bool kPrefetches, bool kStreams>
void touch_stretch(const TouchedArray& array, std::byte* from, std::size_t bytes, std::size_t ahead,
                   typename Lanes::Bits unchanged, typename Lanes::Bits& seen) {
  if (!array.store) {
    touch_lines<Lanes, true, false, kPrefetches, false>(from, bytes, ahead, unchanged, seen);
  } else if (array.load) {
    touch_lines<Lanes, true, true, kPrefetches, kStreams>(from, bytes, ahead, unchanged, seen);
  } else {
    // Streaming stores read nothing, so there is nothing to prefetch.
    touch_lines<Lanes, false, true, kPrefetches && !kStreams, kStreams>(from, bytes, ahead,
                                                                        unchanged, seen);
  }
}

template <class Lanes, bool kPrefetches, bool kStreams>
void touch_arrays(const TouchedArray* arrays, std::size_t count, std::size_t rows,
                  std::size_t stretch) {
  constexpr std::size_t kPartsOfRow = TouchedArray::kRow / kCacheLine;
  // Hides from the compiler that the values do not change.
  std::uint32_t nothing = 0;
  asm volatile("" : "+r"(nothing));
  const auto unchanged = Lanes::pattern(nothing);
  auto seen = unchanged;
  const Prefetch distances(arrays[0].row_bytes == TouchedArray::kRow * sizeof(float));
  const std::size_t parts = rows * kPartsOfRow;
  for (std::size_t part = 0; part < parts; part += stretch) {
    const std::size_t here = part + stretch < parts ? stretch : parts - part;
    for (std::size_t n = 0; n < count; ++n) {
      const TouchedArray& array = arrays[n];
      const std::size_t part_bytes = array.row_bytes / kPartsOfRow;
      const bool narrow = array.row_bytes == TouchedArray::kRow * sizeof(std::uint16_t);
      touch_stretch<Lanes, kPrefetches, kStreams>(array, array.data + part * part_bytes,
                                                  here * part_bytes, distances.bytes(narrow),
                                                  unchanged, seen);
    }
  }
  if constexpr (kStreams) Lanes::end_streams();
  std::uint16_t sink[Lanes::kWidth];
  Lanes::narrow(sink, seen);
  asm volatile("" : : "r"(sink) : "memory");
}

/// Moves the data of an update in one way (TouchWay). Streaming stores need whole lines, so
/// unaligned arrays turn them off.
template <class Lanes>
void run_touch(const TouchedArray* arrays, std::size_t count, std::size_t rows, std::size_t stretch,
               bool prefetches, bool streams) noexcept {
  for (std::size_t n = 0; n < count; ++n) {
    if (reinterpret_cast<std::uintptr_t>(arrays[n].data) % kCacheLine != 0) streams = false;
  }
  if (prefetches) {
    streams ? touch_arrays<Lanes, true, true>(arrays, count, rows, stretch)
            : touch_arrays<Lanes, true, false>(arrays, count, rows, stretch);
  } else {
    streams ? touch_arrays<Lanes, false, true>(arrays, count, rows, stretch)
            : touch_arrays<Lanes, false, false>(arrays, count, rows, stretch);
  }
}

}  // namespace
}  // namespace ballast::cpu_adam
