#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "states.h"

namespace ballast::cpu_adam::updater_test {
namespace {

using test::describe;
using test::difference;
using test::hyper_at;
using test::Layout;
using test::States;

/// Sets BALLAST_ISA_MASK during its lifetime.
class Mask {
 public:
  explicit Mask(const char* value) {
    if (const char* old = std::getenv(kName)) saved_ = old;
    setenv(kName, value, 1);
  }
  ~Mask() { saved_ ? setenv(kName, saved_->c_str(), 1) : unsetenv(kName); }
  Mask(const Mask&) = delete;
  Mask& operator=(const Mask&) = delete;

 private:
  static constexpr const char* kName = "BALLAST_ISA_MASK";
  std::optional<std::string> saved_;
};

/// The default layout of every optimizer, and every format of moments.
std::vector<Layout> layouts() {
  std::vector<Layout> all;
  for (const auto optimizer : test::kOptimizers) all.push_back({optimizer});
  all.push_back({.weights = Weights::Format::plain, .gradient = DType::f32});
  all.push_back({.moments = Moments::Format::bf16_first});
  all.push_back({.moments = Moments::Format::blockwise8});
  return all;
}

States stepped(const Updater& updater, States states) {
  test::run(updater, states, 3);
  return states;
}

/// The category and the message of the Error that `broken` throws; empty if it throws none.
struct Thrown {
  std::optional<ErrorCategory> category;
  std::string message;
};
Thrown thrown_by(const std::function<void()>& broken) {
  try {
    broken();
  } catch (const Error& error) {
    return {error.category(), error.what()};
  }
  return {};
}

TEST(Updater, RunsOtherWorkOnItsThreadsEachChunkOnce) {
  for (const int threads : {1, 4}) {
    const Updater updater({.threads = threads});
    for (const Elems count : {0, 1, 3, 1000}) {
      std::vector<std::atomic<int>> visits(count);
      updater.for_ranges(count, [&](Elems first, Elems last) {
        for (Elems i = first; i < last; ++i) ++visits[i];
      });
      EXPECT_TRUE(std::all_of(visits.begin(), visits.end(), [](int n) { return n == 1; }))
          << threads << " threads, " << count;
    }
    EXPECT_THROW(updater.for_ranges(1000,
                                    [](Elems first, Elems last) {
                                      if (first <= 999 && last > 999) {
                                        throw Error(ErrorCategory::data, "broken");
                                      }
                                    }),
                 Error);
  }
}

TEST(Updater, ResultIsTheSameForEveryNumberOfThreads) {
  for (const Layout& layout : layouts()) {
    const States start = States::random(layout, 400'009, 11, 5);
    const States expected = stepped(Updater({.threads = 1}), start);
    for (const int threads : {2, 3, 7}) {
      EXPECT_EQ(difference(stepped(Updater({.threads = threads}), start), expected), "")
          << threads << " threads, " << describe(layout);
    }
  }
}

TEST(Updater, LargeShardIsUpdatedLikeItsParts) {
  const Updater updater({.threads = 2});
  for (const Layout& layout : layouts()) {
    const bool blockwise = layout.moments == Moments::Format::blockwise8;
    for (const Elems first_element : {Elems{0}, Elems{1'280}, (Elems{1} << 32) - 65'536}) {
      States whole = States::random(layout, 150'007, 15);
      whole.first_element = first_element;
      States parts = whole;
      const std::size_t length = blockwise ? 5 * Codes::kBlock : 1'009;
      for (int step = 1; step <= 2; ++step) {
        const Hyper hyper = hyper_at(layout.optimizer, step);
        updater.step(hyper, whole.shard());
        for (std::size_t from = 0; from < parts.size; from += length) {
          updater.step(hyper, part_of(parts.shard(), from, std::min(length, parts.size - from)));
        }
      }
      EXPECT_EQ(difference(whole, parts), "") << describe(layout) << ", from " << first_element;
    }
  }
}

TEST(Updater, OtherWorkSurroundsTheUpdateOfEachElementOnce) {
  const Updater updater({.threads = 3});
  for (const Layout& layout : layouts()) {
    for (const std::size_t size : {1, 255, 8'192, 200'011}) {
      const States start = States::random(layout, size, 17, 3);
      const Hyper hyper = hyper_at(layout.optimizer, 2);
      States states = start;
      std::vector<int> stages(size, 0);
      const auto advance = [&](Elems first, Elems count, int from) {
        EXPECT_EQ(first % Codes::kBlock, 0U);
        for (Elems i = first; i < first + count; ++i) {
          if (stages[i] == from) ++stages[i];
        }
      };
      updater.step(hyper, states.shard(),
                   {.before = [&](Elems first, Elems count) { advance(first, count, 0); },
                    .after = [&](Elems first, Elems count) { advance(first, count, 1); }});
      EXPECT_EQ(stages, std::vector<int>(size, 2));
      States expected = start;
      updater.step(hyper, expected.shard());
      EXPECT_EQ(difference(states, expected), "") << describe(layout);
    }
  }
}

TEST(Updater, AStepThatKeepsTheOldValuesCanBeUndone) {
  const Updater updater({.threads = 3});
  for (const Layout& layout : layouts()) {
    for (const std::size_t size : {1, 255, 8'192, 200'011}) {
      const States start = States::random(layout, size, 17, 3);
      const Hyper hyper = hyper_at(layout.optimizer, 2);
      States expected = start;
      updater.step(hyper, expected.shard());
      States states = start;
      States old = States::random(layout, size, 18, 3);
      updater.step(hyper, states.shard(), old.shard());
      EXPECT_EQ(difference(states, expected), "") << describe(layout);
      EXPECT_TRUE(old.guards_intact());
      updater.restore(layout.optimizer, states.shard(), old.shard());
      EXPECT_EQ(difference(states, start), "") << describe(layout);
      EXPECT_TRUE(states.guards_intact());
    }
  }
}

TEST(Updater, OnlyTheArraysThatAreSavedAreRestored) {
  const Updater updater({.threads = 2});
  const Layout layout = {};
  const States start = States::random(layout, 70'001, 19);
  States stepped = start;
  updater.step(hyper_at(layout.optimizer, 1), stepped.shard());
  States states = start;
  States old(layout, start.size);
  Shard only_weights = old.shard();
  only_weights.weights.remainder_or_copy = only_weights.moments.first =
      only_weights.moments.second = nullptr;
  updater.step(hyper_at(layout.optimizer, 1), states.shard(), only_weights);
  updater.restore(layout.optimizer, states.shard(), only_weights);
  EXPECT_TRUE(states.main == start.main);
  EXPECT_TRUE(states.remainder_or_copy == stepped.remainder_or_copy);
  EXPECT_TRUE(states.first == stepped.first);
  EXPECT_TRUE(states.second == stepped.second);
}

TEST(Updater, ASavedShardOfAnotherFormIsRefused) {
  const Updater updater;
  States states({}, 100);
  States shorter({}, 99);
  EXPECT_THROW(updater.step(hyper_at(Optimizer::adamw, 1), states.shard(), shorter.shard()), Error);
  EXPECT_THROW(updater.restore(Optimizer::adamw, states.shard(), shorter.shard()), Error);
}

TEST(Updater, EveryElementIsUpdatedOnce) {
  for (const auto moments : test::kMoments) {
    for (const std::size_t size : {1, 65'535, 65'536, 65'537, 131'073}) {
      for (const Elems first_element : {0, 256, 65'280}) {
        States states({Optimizer::sgd, Weights::Format::plain, DType::f32, moments}, size);
        states.first_element = first_element;
        for (std::size_t i = 0; i < size; ++i) states.set_gradient(i, 1.0F);
        Updater({.threads = 2})
            .step({.optimizer = Optimizer::sgd, .learning_rate = 1.0}, states.shard());
        const float* weights = states.main.as<float>();
        EXPECT_EQ(std::count(weights, weights + size, -1.0F), static_cast<std::ptrdiff_t>(size));
        EXPECT_TRUE(states.guards_intact());
      }
    }
  }
}

TEST(Updater, StochasticRoundingFollowsTheStepAndTheElement) {
  const Updater updater({.threads = 2});
  for (const auto moments : {Moments::Format::bf16_first, Moments::Format::blockwise8}) {
    // SGD's arithmetic uses neither of the two, so only the rounding can differ.
    const States start =
        States::random({.optimizer = Optimizer::sgd, .moments = moments}, 5'003, 16);
    const auto first_moments = [&](std::int64_t step, Elems first_element) {
      States states = start;
      states.first_element = first_element;
      Hyper hyper = hyper_at(Optimizer::sgd, 1);
      hyper.step = step;
      updater.step(hyper, states.shard());
      EXPECT_TRUE(states.guards_intact());
      return states.first;
    };
    const test::Array expected = first_moments(1, 0);
    EXPECT_TRUE(first_moments(1, 0) == expected);
    EXPECT_FALSE(first_moments(2, 0) == expected);
    EXPECT_FALSE(first_moments(1, Codes::kBlock) == expected);
    EXPECT_FALSE(first_moments(1, Elems{1} << 32) == expected);
    EXPECT_FALSE(first_moments(1, Elems{1} << 40) == first_moments(1, Elems{1} << 32));
  }
}

TEST(Updater, ElementsWithoutWeightDecayAreUpdatedAsIfItWereZero) {
  // The ranges begin and end inside blocks of 8-bit moments, and some are shorter than one.
  const std::vector<ElementRange> ranges = {
      {1'280, 1'312}, {1'344, 1'920}, {2'048, 2'304}, {66'944, 67'008}, {67'040, 150'016}};
  constexpr Elems kFirst = 1'280;
  for (const Layout& layout : layouts()) {
    States start = States::random(layout, 70'007, 19);
    start.first_element = kFirst;
    Hyper hyper = hyper_at(layout.optimizer, 3);
    States decayed = start;
    States undecayed = start;
    Updater({.threads = 1}).step(hyper, decayed.shard());
    hyper.weight_decay = 0.0;
    Updater({.threads = 1}).step(hyper, undecayed.shard());
    hyper = hyper_at(layout.optimizer, 3);
    States found = start;
    Shard shard = found.shard();
    shard.undecayed = ranges;
    Updater({.threads = 1}).step(hyper, shard);
    std::size_t changed = 0;
    for (std::size_t i = 0; i < start.size; ++i) {
      const auto has = [&](const ElementRange& r) {
        return r.first <= kFirst + i && kFirst + i < r.end;
      };
      const bool exempt = std::ranges::any_of(ranges, has);
      const Element expected = (exempt ? undecayed : decayed).element(i);
      const Element own = found.element(i);
      ASSERT_EQ(own.weight, expected.weight) << describe(layout) << ", element " << i;
      Hyper rule = hyper;
      if (exempt) rule.weight_decay = 0.0;
      if (layout.moments == Moments::Format::blockwise8) {
        ASSERT_LE(reference_error(rule, layout.moments, start.element(i), own), 1.0)
            << describe(layout) << ", element " << i;
      } else {
        ASSERT_EQ(own.first, expected.first) << describe(layout) << ", element " << i;
        ASSERT_EQ(own.second, expected.second) << describe(layout) << ", element " << i;
      }
      changed += decayed.element(i).weight != undecayed.element(i).weight ? 1 : 0;
    }
    EXPECT_GT(changed, start.size / 4) << describe(layout);
    for (const int threads : {2, 3}) {
      States other = start;
      shard = other.shard();
      shard.undecayed = ranges;
      Updater({.threads = threads}).step(hyper, shard);
      EXPECT_EQ(difference(other, found), "") << threads << " threads, " << describe(layout);
    }
    States parts = start;
    shard = parts.shard();
    shard.undecayed = ranges;
    constexpr std::size_t kLength = 3 * Codes::kBlock;
    for (std::size_t from = 0; from < start.size; from += kLength) {
      Updater({.threads = 1, .isa = Isa::scalar})
          .step(hyper, part_of(shard, from, std::min(kLength, start.size - from)));
    }
    EXPECT_EQ(difference(parts, found), "") << "in parts, " << describe(layout);
  }
}

TEST(Updater, ExactMomentsDoNotDependOnTheElement) {
  const Updater updater({.threads = 2});
  for (const auto optimizer : test::kOptimizers) {
    States here = States::random({optimizer}, 100'003, 17);
    States there = here;
    there.first_element = 12'345'678'901;
    EXPECT_EQ(difference(stepped(updater, here), stepped(updater, there)), "");
  }
}

TEST(Updater, UsesAllCpusByDefault) {
  EXPECT_EQ(Updater().threads(), usable_cpus());
  EXPECT_EQ(Updater().isa(), active());
  EXPECT_EQ(Updater({.threads = 3}).threads(), 3);
}

TEST(Updater, ResultDoesNotDependOnTheCallersRoundingMode) {
  for (const Layout& layout : layouts()) {
    States start = States::random(layout, 300'001, 12);
    const Updater one({.threads = 1});
    const States expected = stepped(one, start);
    const double sum = one.gradient_stats(start.shard().gradient, start.size).sum_of_squares;
    for (const int threads : {1, 2}) {
      const Updater updater({.threads = threads});
      std::fesetround(FE_UPWARD);
      const States actual = stepped(updater, start);
      const double upward =
          updater.gradient_stats(start.shard().gradient, start.size).sum_of_squares;
      const int mode_after = std::fegetround();
      std::fesetround(FE_TONEAREST);
      EXPECT_EQ(difference(actual, expected), "") << describe(layout);
      EXPECT_EQ(upward, sum);
      EXPECT_EQ(mode_after, FE_UPWARD);
    }
  }
}

TEST(Updater, EmptyShardNeedsNoMemory) {
  const Updater updater({.threads = 2});
  const Shard empty{Weights(static_cast<float*>(nullptr)),
                    Moments(static_cast<float*>(nullptr), nullptr),
                    Gradient(static_cast<const float*>(nullptr))};
  for (const auto optimizer : test::kOptimizers) {
    EXPECT_NO_THROW(updater.step({.optimizer = optimizer}, empty));
    EXPECT_NO_THROW(updater.touch(optimizer, empty));
  }
}

TEST(Updater, ANullPointerIsAStateError) {
  const Updater updater({.threads = 1});
  for (const Layout& layout : test::all_layouts()) {
    States states = States::random(layout, 300, 13);
    const Hyper hyper = hyper_at(layout.optimizer, 1);
    EXPECT_EQ(thrown_by([&] { updater.step(hyper, states.shard()); }).category, std::nullopt)
        << describe(layout);
    for (auto* array : {&states.main, &states.remainder_or_copy, &states.first, &states.second,
                        &states.first_exponents, &states.second_exponents, &states.gradient}) {
      if (array->as<char>() == nullptr) continue;
      const test::Array kept = std::exchange(*array, {});
      EXPECT_EQ(thrown_by([&] { updater.step(hyper, states.shard()); }).category,
                ErrorCategory::state)
          << describe(layout);
      EXPECT_EQ(thrown_by([&] { updater.touch(layout.optimizer, states.shard()); }).category,
                ErrorCategory::state)
          << describe(layout);
      *array = kept;
    }
  }
  const Gradient nothing(static_cast<const Bf16*>(nullptr));
  EXPECT_EQ(thrown_by([&] { static_cast<void>(updater.gradient_stats(nothing, 1)); }).category,
            ErrorCategory::state);
}

TEST(Updater, StepsCountFromOne) {
  const Updater updater({.threads = 1});
  States states = States::random({}, 4, 13);
  for (const std::int64_t step : {0, -1}) {
    const Hyper hyper{.step = step};
    EXPECT_EQ(thrown_by([&] { updater.step(hyper, states.shard()); }).category,
              ErrorCategory::state);
  }
}

TEST(Updater, ShardWithCodesBeginsWithABlock) {
  const Updater updater({.threads = 1});
  for (const Layout& layout : layouts()) {
    States states = States::random(layout, 40, 14);
    states.first_element = 7 * Codes::kBlock + 128;
    const Thrown thrown =
        thrown_by([&] { updater.step(hyper_at(layout.optimizer, 1), states.shard()); });
    if (layout.moments == Moments::Format::blockwise8) {
      EXPECT_EQ(thrown.category, ErrorCategory::state);
    } else {
      EXPECT_EQ(thrown.category, std::nullopt) << thrown.message;
    }
  }
}

TEST(Updater, CanBeMoved) {
  Updater first({.threads = 2});
  Updater second = std::move(first);
  EXPECT_EQ(second.threads(), 2);
  const States start = States::random({}, 1'000, 14);
  EXPECT_EQ(difference(stepped(second, start), stepped(Updater({.threads = 1}), start)), "");
}

TEST(Updater, NegativeThreadsAreAConfigError) {
  EXPECT_EQ(thrown_by([] { const Updater updater({.threads = -1}); }).category,
            ErrorCategory::config);
}

TEST(Updater, NumaNodeThatIsNotThereIsAConfigErrorThatNamesIt) {
  const Thrown thrown = thrown_by([] { const Updater updater({.numa_node = 4'711}); });
  EXPECT_EQ(thrown.category, ErrorCategory::config);
  EXPECT_NE(thrown.message.find("4711"), std::string::npos) << thrown.message;
  EXPECT_EQ(thrown_by([] { const Updater updater({.numa_node = -1}); }).category,
            ErrorCategory::config);
}

TEST(Updater, FirstNumaNodeGivesTheSameBits) {
  const Updater updater({.numa_node = 0});
  EXPECT_GE(updater.threads(), 1);
  EXPECT_LE(updater.threads(), usable_cpus());
  const States start = States::random({}, 200'003, 18);
  EXPECT_EQ(difference(stepped(updater, start), stepped(Updater({.threads = 1}), start)), "");
}

TEST(Updater, AllocatesZeroedPages) {
  for (const std::optional<int> node : {std::optional<int>{}, std::optional<int>{0}}) {
    const Updater updater({.threads = 2, .numa_node = node});
    for (const Bytes bytes : {Bytes{1}, kPage, 3 * kMiB + 5}) {
      const Mapping memory = updater.allocate(bytes);
      const HostBytes all = memory.bytes();
      ASSERT_GE(all.size(), bytes);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(all.data()) % kPage, 0U);
      EXPECT_TRUE(
          std::all_of(all.begin(), all.end(), [](std::byte b) { return b == std::byte{}; }));
      std::fill(all.begin(), all.end(), std::byte{1});
    }
  }
}

TEST(Updater, MoreMemoryThanThereIsAddressSpaceIsAMemoryError) {
  const Updater updater({.threads = 1});
  EXPECT_EQ(thrown_by([&] { static_cast<void>(updater.allocate(Bytes{1} << 60)); }).category,
            ErrorCategory::memory);
}

TEST(Optimizers, NamesReadBack) {
  for (const auto optimizer : test::kOptimizers) {
    EXPECT_EQ(parse_optimizer(to_string(optimizer)), optimizer);
  }
  const Thrown thrown = thrown_by([] { static_cast<void>(parse_optimizer("adamm")); });
  EXPECT_EQ(thrown.category, ErrorCategory::usage);
  EXPECT_NE(thrown.message.find("adagrad"), std::string::npos) << thrown.message;
}

TEST(Isas, ScalarIsAlwaysAvailableAndTheBestOneIsActive) {
  const std::vector<Isa> found = available();
  ASSERT_FALSE(found.empty());
  EXPECT_EQ(found.front(), Isa::scalar);
  EXPECT_EQ(found.back(), active());
}

TEST(Isas, MaskHidesEveryBetterOne) {
  const Mask mask("scalar");
  EXPECT_EQ(available(), std::vector<Isa>{Isa::scalar});
  EXPECT_EQ(Updater({.threads = 1}).isa(), Isa::scalar);
  if (!cpu_supports(Isa::avx2)) return;
  const Mask wider("avx2");
  EXPECT_NE(active(), Isa::avx512);
}

TEST(Isas, NamedOneThatIsNotAvailableIsAConfigErrorThatListsTheOthers) {
  const Mask mask("scalar");
  const Thrown thrown =
      thrown_by([] { const Updater updater({.threads = 1, .isa = Isa::avx512}); });
  EXPECT_EQ(thrown.category, ErrorCategory::config);
  EXPECT_NE(thrown.message.find("avx512"), std::string::npos) << thrown.message;
  EXPECT_NE(thrown.message.find("scalar"), std::string::npos) << thrown.message;
}

TEST(Isas, MisspeltMaskIsReportedWithItsName) {
  const Mask mask("avx3");
  const Thrown thrown = thrown_by([] { static_cast<void>(available()); });
  EXPECT_NE(thrown.message.find("BALLAST_ISA_MASK"), std::string::npos) << thrown.message;
}

}  // namespace
}  // namespace ballast::cpu_adam::updater_test
