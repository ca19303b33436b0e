#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/formats/file_formats.h"

#include "tests/support/fixtures.h"

namespace ballast::formats::event_file_test {
namespace {

TEST(EventFile, HasTheChecksumsOfTheStandard) {
  // RFC 3720, appendix B.4.
  std::string ascending;
  for (char i = 0; i < 32; ++i) ascending += i;
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAU);
  EXPECT_EQ(crc32c(std::string(32, '\xFF')), 0x62A8AB43U);
  EXPECT_EQ(crc32c(ascending), 0x46DD794EU);
  EXPECT_EQ(crc32c(""), 0U);
}

/// TensorBoard's own classes wrote the file (tests/data/make_event_fixture.py).
TEST(EventFile, HasTheBytesOfTensorBoard) {
  const std::vector<Scalar> first = {{"Train/Samples/train_loss", 5.5625},
                                     {"Train/Samples/lr", 1e-3},
                                     {"Train/Samples/nvme_bytes_written", 0.0}};
  const std::vector<Scalar> later = {
      {"Train/Samples/train_loss", std::numeric_limits<double>::infinity()},
      {"Train/Samples/lr", -0.1}};
  constexpr std::int64_t kManySamples = 5'000'000'000;  // more than 32 bits
  const std::string made = event_file_head(1.7e9) + event_session_start(1.7e9, 4) +
                           event_scalars(1.7e9 + 0.25, 4, first) +
                           event_scalars(1.7e9 + 0.5, kManySamples, later);
  std::ifstream file(test::fixture("events/events.out.tfevents.1700000000.host.1.0"),
                     std::ios::binary);
  EXPECT_EQ(made, std::string(std::istreambuf_iterator<char>(file), {}));
}

}  // namespace
}  // namespace ballast::formats::event_file_test
