#include <cmath>
#include <map>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/state/swap_plan.h"

namespace ballast::state::stripe_test {
namespace {

/// Properties of every layout: the segments of an extent cover it in order, and those of a file
/// cover the file, without gaps or overlaps.
void check(const Stripe& stripe, const std::vector<Bytes>& extents) {
  std::map<std::pair<std::size_t, Bytes>, Bytes> files;  // (path, offset): end
  std::size_t chunks = 0;
  Bytes total = 0;
  ASSERT_EQ(stripe.extents(), extents.size());
  for (std::size_t e = 0; e < extents.size(); ++e) {
    EXPECT_EQ(stripe.extent_bytes(e), round_up(extents[e], kPage));
    EXPECT_EQ(stripe.first_chunk(e), chunks);
    chunks += (stripe.extent_bytes(e) + kChunk - 1) / kChunk;
    Bytes end = 0;
    for (const auto& segment : stripe.segments(e)) {
      EXPECT_EQ(segment.start, end);
      EXPECT_EQ(segment.start % kChunk, 0U);
      EXPECT_EQ(segment.offset % kPage, 0U);
      EXPECT_GT(segment.bytes, 0U);
      end += segment.bytes;
      ASSERT_TRUE(
          files.insert({{segment.path, segment.offset}, segment.offset + segment.bytes}).second);
    }
    EXPECT_EQ(end, stripe.extent_bytes(e));
    total += end;
  }
  EXPECT_EQ(stripe.chunks(), chunks);
  EXPECT_EQ(stripe.bytes(), total);
  std::vector<Bytes> ends(stripe.paths(), 0);
  for (const auto& [start, end] : files) {
    EXPECT_EQ(start.second, ends[start.first]);
    ends[start.first] = end;
  }
  for (std::size_t p = 0; p < ends.size(); ++p) EXPECT_EQ(stripe.file_bytes(p), ends[p]);
}

Stripe make(const std::vector<Bytes>& extents, const std::vector<double>& weights,
            Bytes segment = kChunk) {
  return {extents, weights, segment};
}

TEST(Stripe, OverOnePathIsOneExtentBehindTheOther) {
  const std::vector<Bytes> extents = {3 * kMiB + 1, kPage, 0, 2 * kMiB};
  const Stripe stripe = make(extents, {1.0});
  check(stripe, extents);
  EXPECT_EQ(stripe.file_bytes(0), 5 * kMiB + 2 * kPage);
  EXPECT_EQ(stripe.segments(0).size(), 4U);
  EXPECT_EQ(stripe.segments(0)[3].bytes, kPage);
  EXPECT_TRUE(stripe.segments(2).empty());
}

TEST(Stripe, GivesEachPathItsShareOfEveryStretch) {
  const std::vector<Bytes> extents(10, 60 * kMiB);
  const Stripe stripe = make(extents, {3.0, 1.0, 2.0});
  check(stripe, extents);
  EXPECT_EQ(stripe.file_bytes(0), 300 * kMiB);
  EXPECT_EQ(stripe.file_bytes(1), 100 * kMiB);
  EXPECT_EQ(stripe.file_bytes(2), 200 * kMiB);
  for (std::size_t e = 0; e < extents.size(); ++e) {
    std::vector<Bytes> bytes(3, 0);
    for (const auto& segment : stripe.segments(e)) bytes[segment.path] += segment.bytes;
    EXPECT_EQ(bytes, (std::vector<Bytes>{30 * kMiB, 10 * kMiB, 20 * kMiB})) << e;
  }
}

TEST(Stripe, UsesAFarSlowerPathLittleOrNotAtAll) {
  const std::vector<Bytes> extents = {10 * kMiB};
  EXPECT_EQ(make(extents, {1.0, 1000.0}).file_bytes(0), 0U);
  EXPECT_EQ(make(extents, {1.0, 9.0}).file_bytes(0), kMiB);
}

TEST(Stripe, CutsRunsOfWholeChunks) {
  const std::vector<Bytes> extents = {9 * kMiB, kMiB};
  const Stripe stripe = make(extents, {1.0, 1.0}, 3 * kMiB - 5);
  check(stripe, extents);
  EXPECT_EQ(stripe.segments(0).size(), 3U);
  EXPECT_EQ(stripe.segments(0)[1].bytes, 3 * kMiB);
  EXPECT_EQ(make(extents, {1.0}, kPage).segments(0).size(), 9U);
}

TEST(Stripe, IsConsistentForAnySizesAndWeights) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 200; ++i) {
    std::vector<Bytes> extents(random() % 6);
    for (Bytes& bytes : extents) bytes = random() % (12 * kMiB);
    std::vector<double> weights(1 + random() % 4);
    for (double& weight : weights) weight = std::exp2(static_cast<double>(random() % 12) - 6.0);
    check(make(extents, weights, 1 + random() % (3 * kMiB)), extents);
    if (HasFailure()) return;
  }
}

TEST(Stripe, RefusesWeightsWithoutProportion) {
  const std::vector<Bytes> extents = {kMiB};
  EXPECT_THROW(make(extents, {}), Error);
  EXPECT_THROW(make(extents, {1.0, 0.0}), Error);
  EXPECT_THROW(make(extents, {std::nan("")}), Error);
  EXPECT_THROW(make(extents, {INFINITY}), Error);
  EXPECT_THROW((void)make(extents, {1.0}).segments(1), std::out_of_range);
}

}  // namespace
}  // namespace ballast::state::stripe_test
