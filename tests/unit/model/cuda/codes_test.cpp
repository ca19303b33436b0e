// Weight codes: those of a GPU have the same bits as the host's.
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/dtype.h"

#include "src/model/cuda/rows/rows.h"
#include "tests/support/device_array.h"
#include "tests/support/in_every_order.h"
#include "tests/unit/model/cuda/values.h"
#include "tests/unit/model/fixture.h"

namespace ballast::model::cuda::codes_test {
namespace {

using test::DeviceArray;
using test::in_every_order;
using test::must;
using test::rounded;

constexpr std::size_t kBlock = WeightCodes::kBlock;

class CudaCodes : public test::Kernels {};

template <class T>
using Coded = std::tuple<std::vector<std::int8_t>, std::vector<float>, std::vector<T>>;

template <class T>
Coded<T> on_the_host(const std::vector<T>& weights) {
  const std::size_t blocks = weights.size() / kBlock;
  test::Bench b(test::small_gpt2(), sizeof(T) == 4 ? DType::f32 : DType::bf16, {1, 4}, 1, "host");
  const DeviceBytes from = b.device->allocate(weights.size() * sizeof(T), "weights");
  const DeviceBytes codes = b.device->allocate(WeightCodes::bytes_of(weights.size()), "codes");
  const DeviceBytes back = b.device->allocate(from.size(), "back");
  std::memcpy(from.raw(), weights.data(), from.size());
  b.compute->quantize_weights(*b.stream, from, codes);
  b.compute->dequantize_weights(*b.stream, codes, back);
  b.stream->synchronize();
  Coded<T> out = {std::vector<std::int8_t>(weights.size()), std::vector<float>(blocks),
                  std::vector<T>(weights.size())};
  std::memcpy(std::get<0>(out).data(), codes.raw(), weights.size());
  std::memcpy(std::get<1>(out).data(), codes.raw() + weights.size(), blocks * sizeof(float));
  std::memcpy(static_cast<void*>(std::get<2>(out).data()), back.raw(), back.size());
  return out;
}

template <class T>
Coded<T> on_the_gpu(const std::vector<T>& weights) {
  const std::size_t blocks = weights.size() / kBlock;
  const DeviceArray<T> from(weights);
  return in_every_order([&] {
    const DeviceArray<std::int8_t> codes(weights.size(), 99);
    const DeviceArray<float> scales(blocks, -1.0F);
    const DeviceArray<T> back(weights.size(), rounded<T>(-1.0));
    must(quantize_weights<T>(nullptr, from.data(), blocks, codes.data(), scales.data()));
    must(dequantize_weights<T>(nullptr, codes.data(), scales.data(), blocks, back.data()));
    return Coded<T>{codes.get(), scales.get(), back.get()};
  });
}

template <class T>
void expect_the_hosts_bits(const std::vector<T>& weights) {
  const Coded<T> expected = on_the_host(weights);
  const Coded<T> found = on_the_gpu(weights);
  EXPECT_TRUE(test::same_bits(std::get<0>(found), std::get<0>(expected))) << "codes";
  EXPECT_TRUE(test::same_bits(std::get<1>(found), std::get<1>(expected))) << "scales";
  EXPECT_TRUE(test::same_bits(std::get<2>(found), std::get<2>(expected))) << "decoded";
}

/// Blocks of all magnitudes; then blocks with a scale of 0, with the smallest scale and just below
/// it, with values halfway between two codes, and with values that are not finite.
template <class T>
std::vector<T> weights() {
  constexpr std::size_t kRandom = 11;  // the blocks do not fill the last thread block
  std::vector<T> out;
  for (std::size_t i = 0; i < kRandom * kBlock; ++i) {
    const int exponent = static_cast<int>(i / kBlock) * 25 - 125;
    out.push_back(rounded<T>(std::ldexp(random_normal(5, i), exponent)));
  }
  const auto block = [&](double rest, double last) {
    out.insert(out.end(), kBlock - 1, rounded<T>(rest));
    out.push_back(rounded<T>(last));
  };
  block(0.0, 0.0);
  block(-0.0, 0x1p-140);
  block(0x1p-127, 127 * 0x1p-126);
  block(0x1p-127, 126 * 0x1p-126);
  block(2.5, 127.0);
  block(-3.5, -127.0);
  block(0.5, std::numeric_limits<double>::infinity());
  block(0.5, -std::numeric_limits<double>::infinity());
  block(-0.5, std::numeric_limits<double>::quiet_NaN());
  out.front() = rounded<T>(std::numeric_limits<double>::quiet_NaN());
  return out;
}

TEST_F(CudaCodes, AreTheHostsInFp32) {
  expect_the_hosts_bits(weights<float>());
}
TEST_F(CudaCodes, AreTheHostsInBf16) {
  expect_the_hosts_bits(weights<Bf16>());
}

TEST_F(CudaCodes, EmptyInputsAreAccepted) {
  EXPECT_EQ(quantize_weights<float>(nullptr, nullptr, 0, nullptr, nullptr), cudaSuccess);
  EXPECT_EQ(dequantize_weights<float>(nullptr, nullptr, nullptr, 0, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace ballast::model::cuda::codes_test
