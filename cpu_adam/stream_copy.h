#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ballast/core/units.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace ballast::cpu_adam {

/// Copies with stores that bypass the caches where x86 has them: other stores first read the lines
/// that they replace, which takes twice the memory bandwidth. finish_stream_copies() must precede
/// any use of the copy by other threads.
inline void stream_copy(void* to, const void* from, Bytes bytes) {
#if defined(__SSE2__)
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  constexpr Bytes kWord = sizeof(__m128i);
  const Bytes misplaced = reinterpret_cast<std::uintptr_t>(target) % kWord;
  const Bytes before = misplaced == 0 ? 0 : std::min(bytes, kWord - misplaced);
  std::memcpy(target, source, before);
  Bytes at = before;
  for (; at + kWord <= bytes; at += kWord) {
    const __m128i word = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + at));
    _mm_stream_si128(reinterpret_cast<__m128i*>(target + at), word);
  }
  std::memcpy(target + at, source + at, bytes - at);
#else
  std::memcpy(to, from, bytes);
#endif
}

inline void finish_stream_copies() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace ballast::cpu_adam
