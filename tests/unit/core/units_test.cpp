#include "ballast/core/units.h"

#include <string>
#include <string_view>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

namespace ballast::units_test {
namespace {

TEST(ParseBytes, ReadsUnits) {
  EXPECT_EQ(parse_bytes("512"), 512U);
  EXPECT_EQ(parse_bytes("1KiB"), 1024U);
  EXPECT_EQ(parse_bytes("1.5 GiB"), 3 * kGiB / 2);
  EXPECT_EQ(parse_bytes(" 10GB "), 10'000'000'000U);
  EXPECT_EQ(parse_bytes("2TiB"), 2048 * kGiB);
}

TEST(ParseBytes, ReadsEveryUnitThatItNames) {
  for (const char* unit : {"B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"}) {
    EXPECT_NE(kSizeForm.find(unit), std::string_view::npos) << unit;
    EXPECT_GE(parse_bytes(std::string("1 ") + unit), 1U) << unit;
  }
  try {
    parse_bytes("64 MXB");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(kSizeForm), std::string::npos) << error.what();
  }
}

TEST(ParseBytes, RefusesWhatIsNoSize) {
  for (const char* text : {"", "x", "-1", "1XB", "1 GiBB", "nan", "1e30", "KiB"}) {
    EXPECT_THROW(parse_bytes(text), Error) << text;
  }
}

TEST(ParseSeconds, ReadsUnits) {
  EXPECT_EQ(parse_seconds("45s"), 45.0);
  EXPECT_EQ(parse_seconds(" 30m "), 1800.0);
  EXPECT_EQ(parse_seconds("1.5 h"), 5400.0);
  EXPECT_EQ(parse_seconds("2 days"), 172800.0);
  EXPECT_EQ(parse_seconds("0.05s"), 0.05);
}

TEST(ParseSeconds, RefusesWhatIsNoTime) {
  for (const char* text : {"", "m", "30", "30x", "0m", "-1m", "nan s", "inf d", "1001d", "1h30m"}) {
    EXPECT_THROW(parse_seconds(text), Error) << text;
  }
}

TEST(ParseCount, ReadsSuffixes) {
  EXPECT_EQ(parse_count("256Mi"), 256U << 20U);
  EXPECT_EQ(parse_count("2k"), 2000U);
  EXPECT_THROW(parse_count("2B"), Error);
}

TEST(Format, ThreeSignificantDigits) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(format_bytes(1023 * kKiB), "1.00 MiB");
  EXPECT_EQ(format_bytes(3 * kGiB), "3.00 GiB");
  EXPECT_EQ(format_count(124'439'808), "124M");
  EXPECT_EQ(format_count(1.23e9), "1.23B");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(999.5), "1.00k");
  EXPECT_EQ(format_count(-45'600), "-45.6k");
  EXPECT_EQ(format_seconds(0.0451), "45ms");
  EXPECT_EQ(format_seconds(200), "3m20s");
  EXPECT_EQ(format_seconds(3720), "1h02m");
}

TEST(Format, RatesHaveDecimalPrefixes) {
  EXPECT_EQ(format_rate(414.2e9, "FLOP"), "414 GFLOP/s");
  EXPECT_EQ(format_rate(1.2e12, "FLOP"), "1.20 TFLOP/s");
  EXPECT_EQ(format_rate(999.6e9, "FLOP"), "1.00 TFLOP/s");
  EXPECT_EQ(format_rate(1.98e15, "FLOP"), "1.98 PFLOP/s");
  EXPECT_EQ(format_rate(31.4e3, "token"), "31.4 ktoken/s");
  EXPECT_EQ(format_rate(12, "FLOP"), "12 FLOP/s");
  EXPECT_EQ(format_rate(0, "FLOP"), "0 FLOP/s");
}

TEST(RoundUp, ReachesTheNextMultiple) {
  EXPECT_EQ(round_up(0, 4096), 0U);
  EXPECT_EQ(round_up(1, 4096), 4096U);
  EXPECT_EQ(round_up(4096, 4096), 4096U);
}

}  // namespace
}  // namespace ballast::units_test
