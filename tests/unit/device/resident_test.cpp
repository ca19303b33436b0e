#include <algorithm>
#include <vector>

#include <gtest/gtest.h>
#include <sys/mman.h>

#include "ballast/core/memory.h"

#include "src/device/implementations.h"
#include "tests/support/page_making.h"

namespace ballast::device::resident_test {
namespace {

constexpr Bytes kHuge = 2 * kMiB;

/// Pages of `memory` that exist.
std::size_t resident_pages(HostBytes memory) {
  std::vector<unsigned char> pages(memory.size() / kPage);
  EXPECT_EQ(mincore(memory.data(), memory.size(), pages.data()), 0);
  return static_cast<std::size_t>(
      std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return page % 2 != 0; }));
}

/// Several pieces, whose borders are inside the memory.
TEST(MakeResident, MakesAllPagesAndNoOthers) {
  if (!test::kernel_makes_pages()) GTEST_SKIP() << "not with this kernel";
  const Mapping mapping(192 * kMiB, "test");
  // Disables huge pages, which may extend beyond the requested range.
  ASSERT_EQ(madvise(mapping.bytes().data(), mapping.bytes().size(), MADV_NOHUGEPAGE), 0);
  const HostBytes asked = mapping.bytes().subspan(5 * kPage, 100 * kMiB + 3 * kPage);
  make_resident(asked);
  EXPECT_EQ(resident_pages(asked), asked.size() / kPage);
  EXPECT_EQ(resident_pages(mapping.bytes()), asked.size() / kPage);
}

TEST(MakeResident, KeepsWhatIsThere) {
  const Mapping mapping(70 * kMiB, "test");
  const HostBytes memory = mapping.bytes();
  for (Bytes at = 0; at < memory.size(); at += 3 * kHuge + kPage) memory[at] = std::byte{7};
  make_resident(memory);
  for (Bytes at = 0; at < memory.size(); at += kPage) {
    ASSERT_EQ(memory[at], at % (3 * kHuge + kPage) == 0 ? std::byte{7} : std::byte{0}) << at;
  }
}

TEST(MakeResident, IgnoresFailures) {
  const Mapping mapping(100 * kMiB, "test");
  ASSERT_EQ(mprotect(mapping.bytes().data(), mapping.bytes().size(), PROT_NONE), 0);
  make_resident(mapping.bytes());
  EXPECT_EQ(resident_pages(mapping.bytes()), 0U);
  make_resident({});
}

}  // namespace
}  // namespace ballast::device::resident_test
