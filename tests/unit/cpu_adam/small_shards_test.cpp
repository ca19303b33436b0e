#include <algorithm>
#include <atomic>
#include <cfenv>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "states.h"

namespace ballast::cpu_adam::small_shards_test {
namespace {

using test::describe;
using test::difference;
using test::Layout;
using test::States;

TEST(SmallShards, AreDividedAmongThreadsEachOnce) {
  constexpr Elems kLarge = Updater::kSmall + 1;
  std::vector<Elems> sizes(3000, 700);
  for (const std::size_t i : {0, 1, 500, 2999}) sizes[i] = kLarge;
  for (const std::size_t i : {2, 3, 1000}) sizes[i] = 0;
  for (const int threads : {1, 4}) {
    const Updater updater({.threads = threads});
    std::vector<std::atomic<int>> visits(sizes.size());
    const auto caller = std::this_thread::get_id();
    updater.for_each(sizes, [&](std::size_t i) {
      ++visits[i];
      if (sizes[i] == kLarge) {
        EXPECT_EQ(std::this_thread::get_id(), caller);
      }
    });
    EXPECT_TRUE(std::all_of(visits.begin(), visits.end(), [](int n) { return n == 1; })) << threads;
    updater.for_each({}, [](std::size_t) { ADD_FAILURE() << "there is nothing"; });
    EXPECT_THROW(updater.for_each(sizes,
                                  [](std::size_t i) {
                                    if (i == 2000) throw Error(ErrorCategory::data, "broken");
                                  }),
                 Error);
  }
}

TEST(SmallShards, HaveTheBitsOfSingleUpdates) {
  for (const Layout& layout :
       {Layout{}, Layout{.weights = Weights::Format::plain, .gradient = DType::f32},
        Layout{.moments = Moments::Format::blockwise8}}) {
    std::vector<States> expected;
    std::vector<Elems> sizes;
    for (std::uint64_t i = 0; i < 90; ++i) {
      sizes.push_back(i == 30 ? 150'000 : 1 + 37 * i);
      expected.push_back(States::random(layout, sizes.back(), i));
    }
    std::vector<States> actual = expected;
    std::vector<double> sums(actual.size());
    const Updater one({.threads = 1});
    for (States& states : expected) test::run(one, states, 3);
    const Updater several({.threads = 3});
    std::fesetround(FE_UPWARD);
    several.for_each(sizes, [&](std::size_t i) {
      sums[i] = several.gradient_stats(actual[i].shard().gradient, sizes[i]).sum_of_squares;
      test::run(several, actual[i], 3);
    });
    const int mode_after = std::fegetround();
    std::fesetround(FE_TONEAREST);
    EXPECT_EQ(mode_after, FE_UPWARD);
    for (std::size_t i = 0; i < actual.size(); ++i) {
      EXPECT_EQ(difference(actual[i], expected[i]), "") << i << ", " << describe(layout);
      EXPECT_EQ(sums[i], one.gradient_stats(actual[i].shard().gradient, sizes[i]).sum_of_squares);
    }
  }
}

}  // namespace
}  // namespace ballast::cpu_adam::small_shards_test
