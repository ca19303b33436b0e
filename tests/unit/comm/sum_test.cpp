#include "src/comm/sum.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/dtype.h"
#include "ballast/core/error.h"

namespace ballast::comm::sum_test {
namespace {

using Values = std::vector<float>;

/// Values of many magnitudes, exact in `type`, so that a different order of a sum changes the last
/// bits.
Values random_values(std::size_t count, std::uint32_t seed, DType type) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> mantissa(-1.0F, 1.0F);
  Values values(count);
  for (float& value : values) {
    value = std::ldexp(mantissa(random), static_cast<int>(random() % 24U));
    with_training_type(
        type, [&](auto of_type) { value = to_float(from_float<decltype(of_type)>(value)); });
  }
  return values;
}

std::vector<std::byte> packed(const Values& values, DType type) {
  std::vector<std::byte> bytes(values.size() * size_of(type));
  for (std::size_t i = 0; i < values.size(); ++i) {
    with_training_type(type, [&](auto of_type) {
      const auto value = from_float<decltype(of_type)>(values[i]);
      std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
    });
  }
  return bytes;
}

std::vector<const std::byte*> starts(const std::vector<std::vector<std::byte>>& sources) {
  std::vector<const std::byte*> pointers;
  for (const auto& source : sources) pointers.push_back(source.data());
  return pointers;
}

struct Case {
  std::vector<Values> values;
  std::vector<std::vector<std::byte>> sources;
};

Case make_case(std::size_t ranks, std::size_t count, DType type) {
  Case made;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    made.values.push_back(random_values(count, static_cast<std::uint32_t>(7 * count + rank), type));
    made.sources.push_back(packed(made.values.back(), type));
  }
  return made;
}

/// A plain loop as the definition of the sum.
Values plain_sum(const Case& of) {
  Values sums = of.values[0];
  for (std::size_t rank = 1; rank < of.values.size(); ++rank) {
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += of.values[rank][i];
  }
  return sums;
}

TEST(SumInOrder, HasTheBitsOfThePlainLoop) {
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    for (const std::size_t ranks : {1, 2, 3, 8}) {
      for (const std::size_t count : {0, 1, 7, 2047, 2048, 2049, 10000}) {
        const Case input = make_case(ranks, count, type);
        std::vector<std::byte> out(count * size_of(type));
        sum_in_order(starts(input.sources), out.data(), out.size(), type);
        EXPECT_EQ(out, packed(plain_sum(input), type))
            << to_string(type) << ", " << ranks << " ranks, " << count << " elements";
      }
    }
  }
}

TEST(SumInOrder, IsCloseToDouble) {
  constexpr std::size_t kCount = 5000;
  const Case input = make_case(4, kCount, DType::bf16);
  std::vector<std::byte> out(kCount * 2);
  sum_in_order(starts(input.sources), out.data(), out.size(), DType::bf16);
  for (std::size_t i = 0; i < kCount; ++i) {
    double sum = 0.0;
    double size = 0.0;
    for (const Values& values : input.values) {
      sum += values[i];
      size += std::abs(values[i]);
    }
    Bf16 bits;
    std::memcpy(&bits, out.data() + 2 * i, 2);
    // Half a unit in the last of bf16's 8 digits, for one rounding, plus a few roundings of fp32.
    EXPECT_NEAR(to_float(bits), sum, std::abs(sum) * 0x1p-8 + size * 0x1p-21) << i;
  }
}

TEST(SumInOrder, OfBf16RoundsOnceAndNotPerTerm) {
  // 1 + 2^-8 is a tie that rounds to 1; twice 2^-8 is the next bf16 above 1.
  const std::vector<Values> terms = {{1.0F}, {0x1p-8F}, {0x1p-8F}};
  std::vector<std::vector<std::byte>> sources;
  for (const Values& term : terms) sources.push_back(packed(term, DType::bf16));
  std::vector<std::byte> out(2);
  sum_in_order(starts(sources), out.data(), 2, DType::bf16);
  EXPECT_EQ(out, packed({1.0F + 0x1p-7F}, DType::bf16));
}

TEST(SumInOrder, AddsInTheOrderOfTheSources) {
  const std::vector<Values> terms = {{1.0F}, {0x1p24F}, {-0x1p24F}};
  std::vector<std::vector<std::byte>> sources;
  for (const Values& term : terms) sources.push_back(packed(term, DType::f32));
  std::vector<std::byte> out(4);
  sum_in_order(starts(sources), out.data(), 4, DType::f32);
  EXPECT_EQ(out, packed({0.0F}, DType::f32));
  std::swap(sources[0], sources[2]);
  sum_in_order(starts(sources), out.data(), 4, DType::f32);
  EXPECT_EQ(out, packed({1.0F}, DType::f32));
}

TEST(SumInOrder, OutMayBeAnySource) {
  for (const DType type : {DType::f32, DType::bf16}) {
    for (std::size_t own = 0; own < 3; ++own) {
      Case input = make_case(3, 5000, type);
      const auto expected = packed(plain_sum(input), type);
      sum_in_order(starts(input.sources), input.sources[own].data(), expected.size(), type);
      EXPECT_EQ(input.sources[own], expected) << own;
    }
  }
}

TEST(SumInOrder, InfinitiesAndNansPassThrough) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<Values> terms = {{kInf, kNan, kInf, -0.0F, 0x1.fep127F},
                                     {1.0F, 1.0F, -kInf, -0.0F, 0x1.fep127F}};
  for (const DType type : {DType::f32, DType::bf16}) {
    std::vector<std::vector<std::byte>> sources;
    for (const Values& term : terms) sources.push_back(packed(term, type));
    std::vector<std::byte> out(terms[0].size() * size_of(type));
    sum_in_order(starts(sources), out.data(), out.size(), type);
    Values sums(terms[0].size());
    for (std::size_t i = 0; i < sums.size(); ++i) {
      std::uint32_t bits = 0;
      const std::size_t size = size_of(type);
      std::memcpy(reinterpret_cast<std::byte*>(&bits) + (4 - size), out.data() + size * i, size);
      sums[i] = std::bit_cast<float>(bits);
    }
    EXPECT_EQ(sums[0], kInf);
    EXPECT_TRUE(std::isnan(sums[1]));
    EXPECT_TRUE(std::isnan(sums[2]));
    EXPECT_TRUE(sums[3] == 0.0F && std::signbit(sums[3]));
    EXPECT_EQ(sums[4], kInf);
  }
}

TEST(SumInOrder, OfFp16BeyondItsRangeIsInfinite) {
  const std::vector<Values> terms = {{40000.0F, 65504.0F}, {40000.0F, 15.0F}};
  std::vector<std::vector<std::byte>> sources;
  for (const Values& term : terms) sources.push_back(packed(term, DType::f16));
  std::vector<std::byte> out(4);
  sum_in_order(starts(sources), out.data(), out.size(), DType::f16);
  EXPECT_EQ(out, packed({std::numeric_limits<float>::infinity(), 65504.0F}, DType::f16));
}

}  // namespace
}  // namespace ballast::comm::sum_test
