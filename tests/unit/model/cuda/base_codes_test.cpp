// Dequantises a base: a GPU's values have the same bits as the host's.
#include <cmath>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/model/packed_values.h"

#include "src/model/cuda/rows/rows.h"
#include "tests/support/device_array.h"
#include "tests/support/in_every_order.h"
#include "tests/support/tags.h"
#include "tests/unit/model/cuda/host_ops.h"
#include "tests/unit/model/cuda/values.h"
#include "tests/unit/model/fixture.h"

namespace ballast::model::cuda::base_codes_test {
namespace {

using test::DeviceArray;
using test::in_every_order;
using test::must;
using test::rounded;

class CudaBaseCodes : public test::Kernels {};

/// Blocks of all magnitudes, and one of zeros.
std::vector<std::byte> quantized(const Quantization& how, Elems elements) {
  std::vector<float> values;
  for (Elems i = 0; i < elements; ++i) {
    const int exponent = static_cast<int>(i / 64 % 30) - 15;
    values.push_back(i / 64 == 2 ? 0.0F
                                 : static_cast<float>(std::ldexp(random_normal(5, i), exponent)));
  }
  const QuantizedArrays arrays(how, elements);
  std::vector<std::byte> out(arrays.bytes);
  std::vector<float> scales(arrays.scales_count);
  encode(how, values, out.data(), scales.data());
  store_scales(arrays, scales, out.data());
  return out;
}

template <class T>
void expect_the_hosts_bits() {
  using Format = Quantization::Format;
  for (const Quantization& how :
       {Quantization{Format::nf4}, Quantization{Format::nf4, true}, Quantization{Format::int8}}) {
    // Neither whole bytes, nor whole blocks, nor whole thread blocks; more than one scale of
    // scales.
    const Elems elements = 64 * 257 + 35;
    const std::vector<std::byte> codes = quantized(how, elements);
    const QuantizedArrays arrays(how, elements);
    std::vector<T> expected(elements);
    test::host_ops<T>().packing->dequantize_base({how, arrays, codes.data()}, expected.data());
    const auto found = in_every_order([&] {
      const DeviceArray<std::byte> there(codes);
      const DeviceArray<std::byte> copied(codes.size(), std::byte{1});
      must(copy_bytes(nullptr, there.data(), copied.data(), codes.size()));
      const DeviceArray<T> out(elements, rounded<T>(-1.0));
      must(dequantize_base(nullptr, {how, arrays, copied.data()}, out.data()));
      return out.get();
    });
    EXPECT_TRUE(test::same_bits(found, expected)) << how.description();
    std::vector<float> exact(elements);
    decode(how, arrays, codes.data(), 0, exact);
    std::vector<T> rounded_values;
    for (const float value : exact) rounded_values.push_back(rounded<T>(value));
    EXPECT_TRUE(test::same_bits(expected, rounded_values)) << how.description();
  }
}

TAG_TESTS("small_shapes", "CudaBaseCodes.AreTheHostsInFp32");
TEST_F(CudaBaseCodes, AreTheHostsInFp32) {
  expect_the_hosts_bits<float>();
}
TAG_TESTS("small_shapes", "CudaBaseCodes.AreTheHostsInBf16");
TEST_F(CudaBaseCodes, AreTheHostsInBf16) {
  expect_the_hosts_bits<Bf16>();
}

}  // namespace
}  // namespace ballast::model::cuda::base_codes_test
