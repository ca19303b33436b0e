// The kernel that sums the parts of a reduce_scatter, without ranks.
#include "src/comm/sum.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "ballast/core/memory.h"
#include "ballast/device/streams.h"

namespace ballast::comm::sum_test {
namespace {

using Content = std::vector<std::byte>;

/// Elements of many magnitudes, so that a different order of a sum is detected, and among them any
/// bit pattern that is not NaN: infinities, denormals, zeros of both signs.
Content random_content(Bytes bytes, DType type, std::uint32_t seed) {
  std::mt19937 random(seed);
  Content content(bytes);
  for (Bytes at = 0; at < bytes; at += size_of(type)) {
    float value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    if (std::isnan(value) || random() % 4 != 0) {
      const double unit = static_cast<double>(random()) * 0x1p-31 - 1.0;
      value = static_cast<float>(std::ldexp(unit, static_cast<int>(random() % 24U)));
    }
    encode({&value, 1}, type, HostBytes(content).subspan(at, size_of(type)));
  }
  return content;
}

/// The sum of infinities of both signs may be any NaN.
void expect_same_numbers(const Content& sums, const Content& expected, DType type) {
  ASSERT_EQ(sums.size(), expected.size());
  const auto numbers = [type](const Content& content) {
    std::vector<float> values(content.size() / size_of(type));
    decode(content, type, values);
    return values;
  };
  const std::vector<float> found = numbers(sums);
  const std::vector<float> wanted = numbers(expected);
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (std::isnan(wanted[i])) {
      ASSERT_TRUE(std::isnan(found[i])) << "element " << i;
    } else {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(found[i]), std::bit_cast<std::uint32_t>(wanted[i]))
          << "element " << i;
    }
  }
}

struct Case {
  DType type;
  std::uint32_t world;
  std::uint32_t rank;
  Bytes pages;
};

/// Distances are a page longer than the terms. The sum replaces the rank's own term, and the page
/// after it must not change.
void expect_sum(device::Device& device, device::Stream& stream, const Case& test) {
  const Bytes size = test.pages * kPage;
  const DeviceBytes own = device.allocate(size + kPage, "own");
  const DeviceBytes others = device.allocate(test.world * (size + kPage), "others");
  std::vector<Content> terms;
  std::vector<const std::byte*> starts;
  for (std::uint32_t rank = 0; rank < test.world; ++rank) {
    terms.push_back(random_content(size, test.type, 100 * test.world + rank));
    device.copy_to_device(
        stream,
        rank == test.rank ? own.subview(0, size) : others.subview(rank * (size + kPage), size),
        terms.back());
    stream.synchronize();
  }
  for (const Content& term : terms) starts.push_back(term.data());
  Content expected(size);
  sum_in_order(starts, expected.data(), size, test.type);

  const SumTerms where = {.own = own.raw(),
                          .others = others.raw(),
                          .distance = size + kPage,
                          .turn = test.rank,
                          .count = test.world};
  ASSERT_EQ(enqueue_sum(device::as_cuda(stream).native(), where, own.raw(), size, test.type),
            cudaSuccess);
  Content sums(size + kPage);
  device.copy_to_host(stream, sums, own);
  stream.synchronize();
  EXPECT_EQ(Content(sums.begin() + static_cast<std::ptrdiff_t>(size), sums.end()), Content(kPage));
  sums.resize(size);
  expect_same_numbers(sums, expected, test.type);
}

TEST(NcclSum, HasTheBitsOfTheSumOnTheHost) {
  if (const std::string refusal = device::cuda_refusal(); !refusal.empty()) GTEST_SKIP() << refusal;
  const auto device = device::make_device({.kind = "cuda", .budget = kGiB});
  const auto stream = device->make_stream("sum");
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    for (const std::uint32_t world : {1U, 2U, 3U, 8U}) {
      for (const std::uint32_t rank : std::set{0U, world / 2, world - 1}) {
        // The last size exceeds one pass of all blocks of the kernel, which sums all terms of its
        // elements in each pass.
        const Bytes passes = (type == DType::f32 ? 1100 : 550);
        for (const Bytes pages : {Bytes{0}, Bytes{1}, Bytes{7}, passes}) {
          if (type == DType::f16 && pages > 7) continue;  // as for bf16
          if ((world != 3 || rank != 1) && pages > 7) continue;
          SCOPED_TRACE(testing::Message() << to_string(type) << ", rank " << rank << " of " << world
                                          << ", " << pages << " pages");
          expect_sum(*device, *stream, {type, world, rank, pages});
        }
      }
    }
  }
}

}  // namespace
}  // namespace ballast::comm::sum_test
