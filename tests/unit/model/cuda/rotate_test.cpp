// Rotary positions on a GPU, compared with those of the host in double, which have their own test.
#define BALLAST_KERNEL_ISA in_double

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "src/model/cuda/rows/rows.h"
#include "src/model/description/rotary_angles.h"
#include "src/model/host/elementwise_kernels.h"
#include "tests/support/device_array.h"
#include "tests/support/in_every_order.h"
#include "tests/support/tags.h"
#include "tests/unit/model/cuda/values.h"

namespace ballast::model::cuda::rotate_test {
namespace {

namespace in_double = host::in_double;
using test::DeviceArray;
using test::exact;
using test::expect_close;
using test::in_every_order;
using test::must;
using test::normals_of;

class CudaRotation : public test::Kernels {};

constexpr double kTheta = 10000.0;

struct Angles {
  std::vector<float> cosine;
  std::vector<float> sine;
};
std::vector<double> frequencies_of(std::size_t pairs) {
  std::vector<double> frequencies;
  for (std::size_t i = 0; i < pairs; ++i) {
    frequencies.push_back(std::pow(kTheta, -static_cast<double>(i) / double(pairs)));
  }
  return frequencies;
}
Angles angles_of(std::size_t length, std::size_t head_dim, double factor = 1.0) {
  const DeviceArray<float> cosine(length * head_dim / 2);
  const DeviceArray<float> sine(cosine.size());
  const Rotary rotary = {.frequencies = frequencies_of(head_dim / 2), .factor = factor};
  must(fill_angles(nullptr, rotary, {.count = length, .length = length}, cosine.data(),
                   sine.data()));
  return {cosine.get(), sine.get()};
}

TAG_TESTS("small_shapes", "CudaRotation.*");
TEST_F(CudaRotation, AnglesAreThoseOfTheirPositions) {
  const std::size_t length = 37;
  const std::size_t half = 9;
  const Angles found = angles_of(length, 2 * half);
  for (std::size_t i = 0; i < length * half; ++i) {
    const double angle = static_cast<double>(i / half) *
                         std::pow(kTheta, -static_cast<double>(i % half) / double{half});
    // Half a unit in the last place, plus the differences between cosines of different machines.
    ASSERT_NEAR(found.cosine[i], std::cos(angle), 0x1.01p-25) << i;
    ASSERT_NEAR(found.sine[i], std::sin(angle), 0x1.01p-25) << i;
  }
}

TEST_F(CudaRotation, AnglesHaveTheFactor) {
  const Angles once = angles_of(5, 16);
  const Angles twice = angles_of(5, 16, 2.0);
  for (std::size_t i = 0; i < once.sine.size(); ++i) {
    ASSERT_EQ(twice.cosine[i], 2.0F * once.cosine[i]) << i;
    ASSERT_EQ(twice.sine[i], 2.0F * once.sine[i]) << i;
  }
}

/// Heads of Gemma 4 have 256 pairs, which two kernels compute.
TEST_F(CudaRotation, AnglesOfManyPairsAreThoseOfEachFrequency) {
  constexpr std::size_t kLength = 3;
  constexpr std::size_t kPairs = 2 * kMaxPairs + 5;
  const Angles found = angles_of(kLength, 2 * kPairs);
  ASSERT_EQ(found.cosine.size(), kLength * kPairs);
  for (std::size_t i = 0; i < found.cosine.size(); ++i) {
    const double angle = static_cast<double>(i / kPairs) *
                         std::pow(kTheta, -static_cast<double>(i % kPairs) / double{kPairs});
    ASSERT_NEAR(found.cosine[i], std::cos(angle), 0x1.01p-25) << i;
    ASSERT_NEAR(found.sine[i], std::sin(angle), 0x1.01p-25) << i;
  }
}

/// Documents of 4, 3 and 2, then of 9 rows. Those of more than 3 rows have other frequencies.
TEST_F(CudaRotation, AnglesOfLongDocumentsHaveTheirOwnFrequencies) {
  constexpr std::size_t kLength = 9;
  constexpr std::size_t kHalf = 5;
  const std::vector<std::int32_t> positions = {0, 1, 2, 3, 0, 1, 2, 0, 1,
                                               0, 1, 2, 3, 4, 5, 6, 7, 8};
  const DeviceArray<std::int32_t> uploaded(positions);
  Rotary rotary = {.frequencies = frequencies_of(kHalf), .trained_length = 3.0};
  for (const double growth : {0.0, 1.5}) {
    rotary.growth = growth;
    rotary.long_frequencies = rotary.frequencies;
    for (double& frequency : rotary.long_frequencies) frequency *= 0.8;
    for (const bool packed : {true, false}) {
      const DeviceArray<float> cosine(positions.size() * kHalf);
      const DeviceArray<float> sine(cosine.size());
      must(fill_angles(nullptr, rotary,
                       {positions.size(), kLength, packed ? uploaded.data() : nullptr, true},
                       cosine.data(), sine.data()));
      for (std::size_t row = 0; row < positions.size(); ++row) {
        const auto tokens = packed ? document_length(positions.data(), row, kLength) : kLength;
        const auto frequencies = frequencies_in_document(rotary, tokens);
        const auto position = static_cast<double>(packed ? positions[row] : row % kLength);
        for (std::size_t i = 0; i < kHalf; ++i) {
          const double angle = position * frequencies[i];
          EXPECT_NEAR(cosine.get()[row * kHalf + i], std::cos(angle), 1e-7) << row << " " << i;
          EXPECT_NEAR(sine.get()[row * kHalf + i], std::sin(angle), 1e-7) << row << " " << i;
        }
      }
    }
  }
}

/// Row r is at position r % 3, or at a given position. Elements after the heads must not change.
/// `rotating`: number of rotated values per head.
template <class T>
void check_rotation(std::size_t rows, std::size_t heads, std::size_t head_dim, std::size_t rotating,
                    bool packed = false, bool interleaved = false) {
  SCOPED_TRACE(testing::Message() << rotating << " values of " << heads << " heads of "
                                  << head_dim);
  const std::size_t length = 3;
  const std::size_t stride = heads * head_dim + 8;
  const Angles angles = angles_of(length, rotating);
  const DeviceArray<float> cosine(angles.cosine);
  const DeviceArray<float> sine(angles.sine);
  const std::vector<T> x = normals_of<T>(rows * stride, 1);
  const std::vector<std::int32_t> positions = {2, 0, 1, 0, 0, 1, 2};
  const DeviceArray<std::int32_t> uploaded(positions);
  for (const float direction : {1.0F, -1.0F}) {
    const std::vector<T> found = in_every_order([&] {
      const DeviceArray<T> turned(x);
      must(rotate<T>(nullptr, turned.data(), stride,
                     {length, packed ? uploaded.data() : nullptr, heads, head_dim, rotating / 2,
                      interleaved, cosine.data(), sine.data(), direction},
                     {rows, heads * head_dim}));
      return turned.get();
    });
    std::vector<double> expected = exact(x);
    const auto rotate_exactly =
        interleaved ? &in_double::interleaved_rope<double> : &in_double::rope<double>;
    rotate_exactly(expected.data(), stride, 0, rows, length, packed ? positions.data() : nullptr,
                   heads, head_dim, rotating / 2, exact(angles.cosine).data(),
                   exact(angles.sine).data(), static_cast<double>(direction));
    expect_close(found, expected, 1e-6);
  }
}
TEST_F(CudaRotation, HeadsAreTurnedAsOnTheHost) {
  // Half sizes that are multiples of eight and others; numbers of heads that do not fill the last
  // thread, and more than a block rotates at once.
  for (const auto& [heads, head_dim] : {std::pair<std::size_t, std::size_t>{1, 16},
                                        {5, 48},
                                        {140, 128},
                                        {3, 20},
                                        {40, 24},
                                        {1, 2},
                                        {4, 64}}) {
    check_rotation<float>(4, heads, head_dim, head_dim);
    check_rotation<Bf16>(7, heads, head_dim, head_dim);
    check_rotation<Bf16>(7, heads, head_dim, head_dim, true);
  }
  check_rotation<Bf16>(3, 5, 48, 16);  // a part of each head
  check_rotation<float>(3, 5, 24, 6);
  check_rotation<Bf16>(7, 5, 48, 16, true, true);
  check_rotation<float>(3, 5, 24, 6, false, true);
}

TEST_F(CudaRotation, EmptyInputsAreAccepted) {
  EXPECT_EQ(fill_angles(nullptr, {.frequencies = {1.0}}, {}, nullptr, nullptr), cudaSuccess);
  EXPECT_EQ(rotate<float>(nullptr, nullptr, 8, {1, nullptr, 1, 8, 4, false, nullptr, nullptr, 1.0F},
                          {0, 8}),
            cudaSuccess);
}

}  // namespace
}  // namespace ballast::model::cuda::rotate_test
