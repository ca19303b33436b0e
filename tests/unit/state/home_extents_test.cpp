#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/state/store.h"

namespace ballast::state::home_extents_test {
namespace {

TEST(HomeExtentsTest, WithoutCheckpointsEveryHomeKeepsItsExtent) {
  const std::vector<Bytes> sizes = {4, 8, 4, 4, 8};
  HomeExtents slots(sizes, 3);
  for (const std::size_t home : {0U, 1U, 2U}) {
    EXPECT_EQ(slots.for_writing(home), home);
    EXPECT_EQ(slots.for_writing(home), home);
  }
}

TEST(HomeExtentsTest, TheFirstWriteAfterACheckpointGoesToAnotherExtent) {
  const std::vector<Bytes> sizes = {4, 8, 4, 8};
  HomeExtents slots(sizes, 2);
  slots.keep(10, std::vector<std::size_t>{0, 1});
  EXPECT_EQ(slots.for_writing(0), 2U);
  EXPECT_EQ(slots.for_writing(0), 2U);
  EXPECT_EQ(slots.extent(0), 2U);
  EXPECT_EQ(slots.extent(1), 1U);
  slots.keep(20, std::vector<std::size_t>{0, 1});
  EXPECT_THROW(slots.for_writing(0), Error);  // extents 0 and 2 are kept
  EXPECT_EQ(slots.for_writing(1), 3U);
  slots.release(10);
  EXPECT_EQ(slots.for_writing(0), 0U);
  EXPECT_EQ(slots.checkpoints(), std::vector<std::uint64_t>{20});
}

TEST(HomeExtentsTest, RefusesARestoreThatIsImpossible) {
  const std::vector<Bytes> sizes = {4, 8, 4};
  HomeExtents slots(sizes, 2);
  using Places = std::vector<std::pair<std::size_t, std::size_t>>;
  EXPECT_THROW(slots.restore(Places{{0, 1}}, {}), Error);          // of another size
  EXPECT_THROW(slots.restore(Places{{0, 0}, {1, 0}}, {}), Error);  // twice
}

/// Random writes, exchanges, checkpoints and restarts; the content of each extent is the number of
/// the write.
TEST(HomeExtentsTest, CheckpointsKeepTheContentOfTheirHomes) {
  constexpr std::size_t kHomes = 6;
  constexpr std::size_t kKept = 2;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    std::mt19937_64 dice(seed);
    std::vector<Bytes> sizes;
    for (std::size_t h = 0; h < kHomes; ++h) sizes.push_back(h < 4 ? 4 : 8);
    for (std::size_t h = 0; h < kHomes * kKept; ++h) sizes.push_back(sizes[h % kHomes]);
    auto slots = std::make_unique<HomeExtents>(sizes, kHomes);
    std::vector<std::size_t> all(kHomes);
    for (std::size_t h = 0; h < kHomes; ++h) all[h] = h;
    std::vector<int> content(sizes.size(), 0);
    std::vector<int> wanted(kHomes, 0);
    struct Saved {
      std::vector<std::size_t> extents;
      std::vector<int> content;
    };
    std::map<std::uint64_t, Saved> saved;
    const auto drop_oldest = [&] {
      slots->release(saved.begin()->first);
      saved.erase(saved.begin());
    };
    int writes = 0;
    for (std::uint64_t turn = 1; turn < 400; ++turn) {
      const std::size_t home = dice() % kHomes;
      switch (dice() % 8) {
        case 0: {
          Saved& now = saved[turn];
          for (const std::size_t h : all) now.extents.push_back(slots->extent(h));
          now.content = wanted;
          slots->keep(turn, all);
          if (saved.size() > kKept) drop_oldest();
          break;
        }
        case 1:
          if (home + 1 < 4) {
            slots->exchange(home, home + 1);
            std::swap(wanted[home], wanted[home + 1]);
          }
          break;
        case 2:
          if (!saved.empty()) {
            const Saved& back = saved.rbegin()->second;
            std::vector<std::pair<std::size_t, std::size_t>> places;
            std::map<std::uint64_t, std::vector<std::size_t>> kept;
            for (const auto& [step, one] : saved) kept[step] = one.extents;
            for (const std::size_t h : all) places.emplace_back(h, back.extents[h]);
            slots = std::make_unique<HomeExtents>(sizes, kHomes);
            slots->restore(places, kept);
            wanted = back.content;
          }
          break;
        default:
          wanted[home] = ++writes;
          content[slots->for_writing(home)] = writes;
      }
      std::set<std::size_t> used;
      for (const std::size_t h : all) {
        EXPECT_EQ(sizes[slots->extent(h)], sizes[h]);
        EXPECT_EQ(content[slots->extent(h)], wanted[h]) << "seed " << seed << ", turn " << turn;
        EXPECT_TRUE(used.insert(slots->extent(h)).second);
      }
      for (const auto& [step, one] : saved) {
        for (const std::size_t h : all) EXPECT_EQ(content[one.extents[h]], one.content[h]);
      }
    }
  }
}

}  // namespace
}  // namespace ballast::state::home_extents_test
