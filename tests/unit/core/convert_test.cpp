#include <bit>
#include <cstdint>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/core/memory.h"

namespace ballast::convert_test {
namespace {

std::uint32_t bits_of(float value) {
  return std::bit_cast<std::uint32_t>(value);
}

/// All patterns of 16 bits, at an odd address.
template <class T>
void decode_all() {
  constexpr std::size_t kCount = 1 << 16;
  std::vector<std::byte> bytes(2 * kCount + 1);
  for (std::size_t i = 0; i < kCount; ++i) {
    const auto pattern = static_cast<std::uint16_t>(i);
    std::memcpy(bytes.data() + 1 + 2 * i, &pattern, 2);
  }
  std::vector<float> values(kCount);
  decode(ConstHostBytes(bytes).subspan(1), kTypeOf<T>, values);
  for (std::size_t i = 0; i < kCount; ++i) {
    ASSERT_EQ(bits_of(values[i]), bits_of(to_float(T{static_cast<std::uint16_t>(i)}))) << i;
  }
}

TEST(Convert, DecodesEveryPattern) {
  decode_all<Bf16>();
  decode_all<F16>();
  const std::vector<float> values = {1.5F, -2.0F};
  std::vector<float> same(2);
  decode(std::as_bytes(std::span(values)), DType::f32, same);
  EXPECT_EQ(same, values);
}

/// Floats of all signs and exponents, near every border of rounding, to an odd address.
template <class T>
void encode_many() {
  std::vector<float> values;
  for (std::uint32_t high = 0; high < 1 << 16; ++high) {
    for (const std::uint32_t low : {0U, 1U, 0x7fffU, 0x8000U, 0x8001U, 0xffffU}) {
      values.push_back(std::bit_cast<float>(high << 16 | low));
    }
  }
  std::vector<std::byte> bytes(2 * values.size() + 1);
  encode(values, kTypeOf<T>, HostBytes(bytes).subspan(1));
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::uint16_t pattern = 0;
    std::memcpy(&pattern, bytes.data() + 1 + 2 * i, 2);
    ASSERT_EQ(pattern, from_float<T>(values[i]).bits) << bits_of(values[i]);
  }
}

TEST(Convert, EncodesLikeTheConversionOfOneValue) {
  encode_many<Bf16>();
  encode_many<F16>();
}

TEST(Convert, RefusesOtherSizes) {
  std::vector<float> values(2);
  std::vector<std::byte> bytes(5);
  EXPECT_THROW(decode(bytes, DType::bf16, values), Error);
  EXPECT_THROW(encode(values, DType::f16, bytes), Error);
}

}  // namespace
}  // namespace ballast::convert_test
