#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "src/data/documents.h"
#include "tests/support/tags.h"

namespace ballast::data::packing_test {
namespace {

std::vector<std::uint64_t> offsets_of(const std::vector<std::uint64_t>& lengths) {
  std::vector<std::uint64_t> offsets = {0};
  for (const auto length : lengths) offsets.push_back(offsets.back() + length);
  return offsets;
}

Packing pack(const std::vector<std::uint64_t>& lengths, std::uint64_t length,
             std::optional<std::uint64_t> seed = {}) {
  return {cut_documents(offsets_of(lengths), length), length, seed};
}

/// The lengths of the pieces of every sequence.
std::vector<std::vector<std::uint32_t>> lengths_of(const Packing& packing) {
  std::vector<std::vector<std::uint32_t>> all;
  for (std::uint64_t s = 0; s < packing.sequences(); ++s) {
    auto& lengths = all.emplace_back();
    for (const Piece& piece : packing.pieces(s)) lengths.push_back(piece.length);
  }
  return all;
}

/// Best-fit decreasing, written naively: the free space of every sequence.
std::vector<std::uint64_t> naive_free_space(std::vector<std::uint64_t> lengths,
                                            std::uint64_t length) {
  std::sort(lengths.rbegin(), lengths.rend());
  std::vector<std::uint64_t> space;
  for (const auto needed : lengths) {
    auto best = space.end();
    for (auto it = space.begin(); it != space.end(); ++it) {
      if (*it >= needed && (best == space.end() || *it < *best)) best = it;
    }
    if (best == space.end()) best = space.insert(space.end(), length);
    *best -= needed;
  }
  std::sort(space.begin(), space.end());
  return space;
}

TEST(CutDocuments, KeepsEveryTokenOnce) {
  const auto pieces = cut_documents(offsets_of({3, 0, 12, 5, 10, 1}), 5);
  std::vector<std::uint64_t> firsts;
  std::vector<std::uint32_t> lengths;
  std::vector<int> continues;
  for (const auto& piece : pieces) {
    firsts.push_back(piece.first);
    lengths.push_back(piece.length);
    continues.push_back(piece.continues ? 1 : 0);
  }
  EXPECT_EQ(firsts, (std::vector<std::uint64_t>{0, 3, 8, 13, 15, 20, 25, 30}));
  EXPECT_EQ(lengths, (std::vector<std::uint32_t>{3, 5, 5, 2, 5, 5, 5, 1}));
  EXPECT_EQ(continues, (std::vector<int>{0, 1, 1, 0, 0, 1, 0, 0}));
}

TEST(Packing, FillsTheSequenceWithTheLeastSpaceThatSuffices) {
  // 7, 6, then 4 with 6 (no space left), 3 with 7; 2 opens a sequence.
  EXPECT_EQ(lengths_of(pack({2, 7, 3, 6, 4}, 10)),
            (std::vector<std::vector<std::uint32_t>>{{2}, {7, 3}, {6, 4}}));
}

TEST(Packing, IsBestFitDecreasing) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 200; ++round) {
    const std::uint64_t length = 1 + random() % 60;
    std::vector<std::uint64_t> lengths(random() % 100);
    for (auto& one : lengths) one = 1 + random() % length;
    for (const auto seed : {std::optional<std::uint64_t>(), std::optional<std::uint64_t>(round)}) {
      const auto packing = pack(lengths, length, seed);
      std::vector<std::uint64_t> space;
      std::vector<std::uint64_t> firsts;
      for (std::uint64_t s = 0; s < packing.sequences(); ++s) {
        space.push_back(length - packing.tokens(s));
        for (const Piece& piece : packing.pieces(s)) firsts.push_back(piece.first);
      }
      std::sort(space.begin(), space.end());
      ASSERT_EQ(space, naive_free_space(lengths, length));
      std::sort(firsts.begin(), firsts.end());
      auto offsets = offsets_of(lengths);
      offsets.pop_back();
      ASSERT_EQ(firsts, offsets);  // every piece once
    }
  }
}

TEST(Packing, KeepsTheOrderOfTheFilesInAndBetweenSequences) {
  const auto packing = pack({1, 9, 8, 2, 5, 5, 5, 4, 1}, 10);
  std::uint64_t before = 0;
  for (std::uint64_t s = 0; s < packing.sequences(); ++s) {
    const auto pieces = packing.pieces(s);
    EXPECT_TRUE(s == 0 || pieces.front().first > before);
    before = pieces.front().first;
    EXPECT_TRUE(std::is_sorted(pieces.begin(), pieces.end(),
                               [](const auto& a, const auto& b) { return a.first < b.first; }));
  }
}

TEST(Packing, SeedsChooseNeighboursAndNothingElse) {
  const std::vector<std::uint64_t> lengths(64, 5);
  const auto partners = [&](std::optional<std::uint64_t> seed) {
    const auto packing = pack(lengths, 10, seed);
    std::vector<std::uint64_t> seconds;
    for (std::uint64_t s = 0; s < packing.sequences(); ++s) {
      seconds.push_back(packing.pieces(s).back().first);
    }
    return seconds;
  };
  EXPECT_EQ(partners({}).size(), 32U);
  EXPECT_EQ(partners(3), partners(3));
  EXPECT_NE(partners(3), partners(4));
  EXPECT_NE(partners(3), partners({}));
}

TAG_TESTS("slow_sanitized", "Packing.PacksAMillionDocumentsWithLittlePadding");
TEST(Packing, PacksAMillionDocumentsWithLittlePadding) {
  std::mt19937_64 random(1);
  std::vector<std::uint64_t> lengths(1'000'000);
  for (auto& one : lengths) one = 1 + random() % 1000 * (random() % 8 == 0 ? 9 : 1);
  const std::uint64_t total = std::accumulate(lengths.begin(), lengths.end(), std::uint64_t{0});
  const auto packing = pack(lengths, 4096, 7);
  const double padding =
      1.0 - static_cast<double>(total) / (static_cast<double>(packing.sequences()) * 4096.0);
  EXPECT_LT(padding, 0.001);
}

TEST(Packing, HasNoSequenceWithoutDocuments) {
  EXPECT_EQ(pack({}, 8, 1).sequences(), 0U);
  EXPECT_EQ(pack({0, 0}, 8).sequences(), 0U);
  EXPECT_THROW(Packing({{.first = 0, .length = 9}}, 8, {}), Error);
}

}  // namespace
}  // namespace ballast::data::packing_test
