#pragma once

#include <sys/mman.h>

#include "ballast/core/mapping.h"

namespace ballast::test {

/// Whether this kernel makes pages when asked (Linux 5.14, MADV_POPULATE_WRITE).
inline bool kernel_makes_pages() {
  constexpr int kPopulateWrite = 23;
  const Mapping page(kPage, "test");
  return madvise(page.bytes().data(), kPage, kPopulateWrite) == 0;
}

}  // namespace ballast::test
