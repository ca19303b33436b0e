// Weight codes, compared with a plain implementation of the definition of WeightCodes.

#include <algorithm>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "ballast/core/dtype.h"
#include "ballast/core/error.h"

#include "tests/unit/model/fixture.h"

namespace ballast::model::codes_test {
namespace {

using test::Bench;
using test::normals;

constexpr Elems kBlock = WeightCodes::kBlock;
constexpr Elems kBlocks = 37;

/// The decoded values, block by block.
std::vector<double> expected(const std::vector<double>& values, DType type) {
  std::vector<double> out;
  for (std::size_t begin = 0; begin < values.size(); begin += kBlock) {
    float most = 0.0F;
    for (std::size_t i = begin; i < begin + kBlock; ++i) {
      most = std::max(most, std::abs(static_cast<float>(values[i])));
    }
    const float scale = most / 127.0F;
    for (std::size_t i = begin; i < begin + kBlock; ++i) {
      const float inverse = 1.0F / scale;
      const float value = std::nearbyint(static_cast<float>(values[i]) * inverse) * scale;
      out.push_back(type == DType::f32 ? value : to_float(to_bf16(value)));
    }
  }
  return out;
}

std::vector<double> there_and_back(Bench& b, DeviceBytes weights) {
  const DeviceBytes codes =
      b.device->allocate(WeightCodes::bytes_of(weights.size() / size_of(b.type)), "codes");
  const DeviceBytes back = b.device->allocate(weights.size(), "back");
  b.compute->quantize_weights(*b.stream, weights, codes);
  b.compute->dequantize_weights(*b.stream, codes, back);
  b.stream->synchronize();
  return b.download(back);
}

TEST(WeightCodes, AreTheNearestMultiplesOfTheirBlocksScale) {
  for (const DType type : {DType::f32, DType::bf16}) {
    for (const int threads : {1, 3}) {
      Bench b(test::small_gpt2(), type, {1, 4}, threads);
      std::vector<float> values = normals<float>(kBlocks * kBlock, 5, 0.02);
      for (std::size_t i = 3 * kBlock; i < 4 * kBlock; ++i) values[i] *= 1e30F;
      values[7] = -3.0F;  // the largest of its block
      const DeviceBytes weights = b.upload(values);
      const std::vector<double> stored = b.download(weights);
      const std::vector<double> found = there_and_back(b, weights);
      EXPECT_EQ(found, expected(stored, type));
      EXPECT_EQ(found[7], -3.0);
    }
  }
}

TEST(WeightCodes, AreOffByAtMostHalfAScale) {
  Bench b(test::small_gpt2(), DType::f32, {1, 4});
  const DeviceBytes weights = b.upload(normals<float>(kBlocks * kBlock, 6));
  const std::vector<double> stored = b.download(weights);
  const std::vector<double> found = there_and_back(b, weights);
  for (std::size_t begin = 0; begin < stored.size(); begin += kBlock) {
    double most = 0.0;
    for (std::size_t i = begin; i < begin + kBlock; ++i) most = std::max(most, std::abs(stored[i]));
    for (std::size_t i = begin; i < begin + kBlock; ++i) {
      ASSERT_NEAR(found[i], stored[i], most / 127.0 / 2.0 * 1.00001) << i;
    }
  }
}

TEST(WeightCodes, DecodeZeroBlocksToZeroAndNonFiniteBlocksToNan) {
  for (const DType type : {DType::f32, DType::bf16}) {
    Bench b(test::small_gpt2(), type, {1, 4});
    std::vector<float> values(5 * kBlock, 0.0F);
    values[kBlock + 3] = 1e-37F;
    values[2 * kBlock] = std::numeric_limits<float>::infinity();
    values[3 * kBlock + 255] = std::numeric_limits<float>::quiet_NaN();
    values[4 * kBlock + 1] = 1.0F;
    const std::vector<double> found = there_and_back(b, b.upload(values));
    for (std::size_t i = 0; i < found.size(); ++i) {
      const std::size_t block = i / kBlock;
      EXPECT_EQ(std::isnan(found[i]), block == 2 || block == 3) << i;
      if (block < 2) {
        EXPECT_EQ(found[i], 0.0) << i;
      }
    }
    EXPECT_EQ(found[4 * kBlock + 1], 1.0);
  }
}

TEST(WeightCodes, AreRefusedForOtherSizes) {
  Bench b(test::small_gpt2(), DType::bf16, {1, 4});
  const DeviceBytes weights = b.device->allocate(2 * kBlock * 16, "weights");
  const DeviceBytes codes = b.device->allocate(WeightCodes::bytes_of(kBlock * 16), "codes");
  EXPECT_THROW(b.compute->quantize_weights(*b.stream, weights.subview(0, 300), codes), Error);
  EXPECT_THROW(b.compute->dequantize_weights(*b.stream, codes.subview(0, 100), weights), Error);
}

}  // namespace
}  // namespace ballast::model::codes_test
