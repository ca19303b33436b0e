#include <algorithm>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "tools/io_load/load.h"

namespace ballast::tools::io_content_test {
namespace {

using Block = std::vector<std::byte>;

TEST(IoContent, AcceptsWrittenContent) {
  IoContent content(3, kMiB);
  Block block(64 * kKiB);
  content.fill_next(block, 128 * kKiB);
  EXPECT_EQ(content.mistake(block, 128 * kKiB), "");
  content.fill_next(block, 128 * kKiB);
  EXPECT_EQ(content.mistake(block, 128 * kKiB), "");
}

TEST(IoContent, SeesAStaleBlockInPartOfIt) {
  IoContent content(0, kMiB);
  Block old(8 * kKiB);
  content.fill_next(old, 0);
  Block fresh(8 * kKiB);
  content.fill_next(fresh, 0);
  EXPECT_EQ(content.mistake(old, 0), "offset=0: holds data of write 1 instead of write 2");
  std::copy(old.begin() + kPage, old.end(), fresh.begin() + kPage);
  EXPECT_EQ(content.mistake(fresh, 0), "offset=4096: holds data of write 1 instead of write 2");
}

TEST(IoContent, SeesEveryFlippedBit) {
  IoContent content(0, kMiB);
  Block block(kPage);
  content.fill_next(block, kPage);
  for (std::size_t bit = 0; bit < 8 * block.size(); bit += 37) {
    block[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_EQ(content.mistake(block, kPage), "offset=" + std::to_string(kPage + bit / 8) +
                                                 ": bit " + std::to_string(bit % 8) +
                                                 " of this byte is flipped");
    block[bit / 8] ^= std::byte{1} << (bit % 8);
  }
}

TEST(IoContent, SaysWhereAMisplacedBlockBelongs) {
  IoContent content(0, kMiB);
  IoContent other(1, kMiB);
  Block block(kPage);
  content.fill_next(block, 5 * kPage);
  EXPECT_EQ(content.mistake(block, 2 * kPage), "offset=8192: holds data of offset 20480");
  other.fill_next(block, 2 * kPage);
  EXPECT_EQ(content.mistake(block, 2 * kPage),
            "offset=8192: holds data of another file's offset 8192");
}

TEST(IoContent, ShowsForeignWords) {
  IoContent content(0, kMiB);
  Block block(kPage);
  content.fill_next(block, 0);
  std::memset(block.data() + 16, 0, 8);
  const std::string mistake = content.mistake(block, 0);
  EXPECT_EQ(mistake.substr(0, 47), "offset=16: holds 0x0000000000000000 instead of ") << mistake;
}

TEST(IoContent, TakesEveryByteOfTheBlockIntoAccount) {
  IoContent content(0, kMiB);
  Block block(2 * kPage);
  content.fill_next(block, 0);
  for (std::size_t at = 0; at < block.size(); at += 61) {
    block[at] ^= std::byte{0xFF};
    EXPECT_NE(content.mistake(block, 0), "") << at;
    block[at] ^= std::byte{0xFF};
  }
}

}  // namespace
}  // namespace ballast::tools::io_content_test
