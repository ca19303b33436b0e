#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/dtype.h"
#include "ballast/model/lora.h"
#include "ballast/model/packed_values.h"

#include "tests/support/fixtures.h"

// The files are those of tests/data/make_quantization_fixture.py.

namespace ballast::model::quantization_test {
namespace {

using Format = Quantization::Format;

constexpr Elems kElements = 17 * 1024;

/// The fixture's arrays, one after the other.
class Arrays {
 public:
  Arrays() {
    std::ifstream file(test::fixture("quantization/codes.bin"), std::ios::binary);
    content_.assign(std::istreambuf_iterator<char>(file), {});
  }

  template <class T>
  std::vector<T> next(std::size_t count) {
    std::vector<T> values(count);
    if (at_ + count * sizeof(T) > content_.size()) throw std::runtime_error("the fixture ends");
    std::memcpy(static_cast<void*>(values.data()), content_.data() + at_, count * sizeof(T));
    at_ += count * sizeof(T);
    return values;
  }
  std::vector<float> next_bf16(std::size_t count) {
    std::vector<float> values;
    for (const Bf16 value : next<Bf16>(count)) values.push_back(to_float(value));
    return values;
  }

 private:
  std::string content_;
  std::size_t at_ = 0;
};

std::vector<std::byte> quantized(const Quantization& quantization,
                                 const std::vector<float>& values) {
  const QuantizedArrays arrays(quantization, values.size());
  std::vector<std::byte> out(arrays.bytes);
  std::vector<float> scales(arrays.scales_count);
  encode(quantization, values, out.data(), scales.data());
  store_scales(arrays, scales, out.data());
  return out;
}

template <class T>
void expect_array(const std::vector<std::byte>& found, Bytes offset, const std::vector<T>& wanted,
                  const char* what) {
  ASSERT_GE(found.size(), offset + wanted.size() * sizeof(T)) << what;
  EXPECT_EQ(std::memcmp(found.data() + offset, wanted.data(), wanted.size() * sizeof(T)), 0)
      << what;
}

/// Expects values rounded to bf16, as bitsandbytes dequantises for a model in bf16.
void expect_decoded(const Quantization& quantization, const std::vector<std::byte>& codes,
                    const std::vector<float>& wanted) {
  std::vector<float> values(wanted.size());
  decode(quantization, {quantization, wanted.size()}, codes.data(), 0, values);
  std::size_t different = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    different += to_float(to_bf16(values[i])) == wanted[i] ? 0 : 1;
  }
  EXPECT_EQ(different, 0U);
}

TEST(Quantization, HasTheCodesOfBitsandbytes) {
  Arrays arrays;
  const auto map = arrays.next<float>(256);
  EXPECT_TRUE(std::equal(map.begin(), map.end(), dynamic_map().begin()));
  const auto values = arrays.next<float>(16);
  EXPECT_TRUE(std::equal(values.begin(), values.end(), nf4_values().begin()));
  const std::vector<float> matrix = arrays.next_bf16(kElements);

  const Quantization nf4 = {Format::nf4};
  const std::vector<std::byte> four_bits = quantized(nf4, matrix);
  const QuantizedArrays at(nf4, kElements);
  const auto codes = arrays.next<std::uint8_t>(kElements / 2);
  expect_array(four_bits, 0, codes, "nf4");
  expect_array(four_bits, at.scales, arrays.next<float>(kElements / 64), "scales of nf4");
  expect_decoded(nf4, four_bits, arrays.next_bf16(kElements));

  const Quantization twice = {Format::nf4, true};
  const std::vector<std::byte> nested = quantized(twice, matrix);
  const QuantizedArrays in(twice, kElements);
  expect_array(nested, 0, codes, "nf4 with quantized scales");
  expect_array(nested, in.scales, arrays.next<std::uint8_t>(kElements / 64), "quantized scales");
  expect_array(nested, in.nested, arrays.next<float>(2), "scales of scales");
  expect_array(nested, in.mean, arrays.next<float>(1), "mean of scales");
  expect_decoded(twice, nested, arrays.next_bf16(kElements));

  const Quantization int8 = {Format::int8};
  const std::vector<std::byte> bytes = quantized(int8, matrix);
  expect_array(bytes, 0, arrays.next<std::uint8_t>(kElements), "int8");
  expect_array(bytes, QuantizedArrays(int8, kElements).scales, arrays.next<float>(kElements / 256),
               "scales of int8");
  expect_decoded(int8, bytes, arrays.next_bf16(kElements));
}

/// Elements that fill neither a byte nor a block, in every part.
TEST(Quantization, AcceptsAnyNumberOfElements) {
  for (const Quantization& how :
       {Quantization{Format::nf4}, Quantization{Format::nf4, true}, Quantization{Format::int8}}) {
    std::vector<float> values(64 * 257 + 33);
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = std::sin(static_cast<float>(i)) + 0.25F;
    }
    const std::vector<std::byte> codes = quantized(how, values);
    const QuantizedArrays arrays(how, values.size());
    std::vector<float> whole(values.size());
    decode(how, arrays, codes.data(), 0, whole);
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_NEAR(whole[i], values[i], how.format == Format::int8 ? 0.03 : 0.2) << i;
    }
    std::vector<float> part(101);
    decode(how, arrays, codes.data(), values.size() - 101, part);
    EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.end() - 101));
  }
}

TEST(Quantization, OfValuesThatAreNotFiniteIsNotFinite) {
  for (const Format format : {Format::nf4, Format::int8}) {
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      std::vector<float> values(300, 1.0F);
      values[3] = bad;
      const Quantization how = {format};
      const std::vector<std::byte> codes = quantized(how, values);
      std::vector<float> found(values.size());
      decode(how, {how, values.size()}, codes.data(), 0, found);
      EXPECT_FALSE(std::isfinite(found[3]));
      EXPECT_EQ(found[299], 1.0F);
    }
  }
}

}  // namespace
}  // namespace ballast::model::quantization_test
