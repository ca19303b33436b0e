#pragma once

#include <sys/mman.h>

#include "ballast/core/memory.h"

namespace ballast::test {

/// Whether this kernel can populate pages (Linux 5.14, MADV_POPULATE_WRITE).
inline bool kernel_makes_pages() {
  constexpr int kPopulateWrite = 23;
  const Mapping page(kPage, "test");
  return madvise(page.bytes().data(), kPage, kPopulateWrite) == 0;
}

}  // namespace ballast::test
