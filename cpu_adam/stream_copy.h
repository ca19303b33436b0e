#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ballast/core/units.h"

// stream_copy() copies with stores that bypass the caches where x86 has them: other stores first
// read the lines that they replace, which takes more memory bandwidth. finish_stream_copies() must
// precede any use of the copy by other threads.

#if defined(__SSE2__)

#include <emmintrin.h>

namespace ballast::cpu_adam {

inline void stream_copy(void* to, const void* from, Bytes bytes) {
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
}

inline void finish_stream_copies() {
  _mm_sfence();
}

}  // namespace ballast::cpu_adam

#else

namespace ballast::cpu_adam {

inline void stream_copy(void* to, const void* from, Bytes bytes) {
  std::memcpy(to, from, bytes);
}

inline void finish_stream_copies() {}

}  // namespace ballast::cpu_adam

#endif
