#include <algorithm>
#include <cfenv>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "states.h"

namespace ballast::cpu_adam {
namespace {

using test::difference;
using test::hyper_at;
using test::States;

/// Sets BALLAST_ISA_MASK for the life of the object.
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

States stepped(const Updater& updater, States states) {
  for (std::int64_t step = 1; step <= 3; ++step) updater.step(hyper_at(step), states.split());
  States plain = states;
  for (std::int64_t step = 4; step <= 6; ++step) updater.step(hyper_at(step), plain.plain());
  return plain;
}

TEST(Updater, ResultIsTheSameForEveryNumberOfThreads) {
  const States start(500'009, 11, 5);
  const States expected = stepped(Updater(1), start);
  for (const int threads : {2, 3, 7}) {
    EXPECT_EQ(difference(stepped(Updater(threads), start), expected), "") << threads << " threads";
  }
}

TEST(Updater, LargeShardIsUpdatedLikeItsParts) {
  States whole(300'007, 15);
  States parts = whole;
  const Updater updater(2);
  updater.step(hyper_at(1), whole.plain());
  const PlainShard all = parts.plain();
  constexpr Elems kPart = 1'009;
  for (Elems i = 0; i < all.size; i += kPart) {
    updater.step(hyper_at(1),
                 PlainShard{all.weight + i, all.first_moment + i, all.second_moment + i,
                            all.gradient + i, std::min(kPart, all.size - i)});
  }
  EXPECT_EQ(difference(whole, parts), "");
  updater.step(hyper_at(2), whole.split());
  const SplitShard split = parts.split();
  for (Elems i = 0; i < split.size; i += kPart) {
    updater.step(hyper_at(2), SplitShard{split.weight + i, split.remainder + i,
                                         split.first_moment + i, split.second_moment + i,
                                         split.gradient + i, std::min(kPart, split.size - i)});
  }
  EXPECT_EQ(difference(whole, parts), "");
}

TEST(Updater, UsesAllCpusWhenNotToldOtherwise) {
  EXPECT_EQ(Updater().threads(), usable_cpus());
  EXPECT_EQ(Updater().isa(), active());
  EXPECT_EQ(Updater(3).threads(), 3);
}

TEST(Updater, ResultDoesNotDependOnTheCallersRoundingMode) {
  const States start(1'000, 12);
  const States expected = stepped(Updater(1), start);
  for (const int threads : {1, 2}) {
    const Updater updater(threads);
    std::fesetround(FE_UPWARD);
    const States actual = stepped(updater, start);
    const int mode_after = std::fegetround();
    std::fesetround(FE_TONEAREST);
    EXPECT_EQ(difference(actual, expected), "");
    EXPECT_EQ(mode_after, FE_UPWARD);
  }
}

TEST(Updater, EmptyShardNeedsNoMemory) {
  const Updater updater(2);
  EXPECT_NO_THROW(updater.step(AdamW{}, SplitShard{}));
  EXPECT_NO_THROW(updater.step(AdamW{}, PlainShard{}));
}

TEST(Updater, NullPointerOrStepZeroIsABrokenPromise) {
  const Updater updater(1);
  States states(4, 13);
  PlainShard shard = states.plain();
  shard.second_moment = nullptr;
  EXPECT_THROW(updater.step(AdamW{}, shard), Error);
  AdamW hyper;
  hyper.step = 0;
  EXPECT_THROW(updater.step(hyper, states.plain()), Error);
}

TEST(Updater, CanBeMoved) {
  Updater first(2);
  Updater second = std::move(first);
  EXPECT_EQ(second.threads(), 2);
  const States start(1'000, 14);
  EXPECT_EQ(difference(stepped(second, start), stepped(Updater(1), start)), "");
}

TEST(Updater, NegativeThreadsAreAConfigError) {
  try {
    const Updater updater(-1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::config);
  }
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
  EXPECT_EQ(Updater(1).isa(), Isa::scalar);
  if (!cpu_supports(Isa::avx2)) return;
  const Mask wider("avx2");
  EXPECT_NE(active(), Isa::avx512);
}

TEST(Isas, NamedOneThatIsNotAvailableIsAConfigErrorThatListsTheOthers) {
  const Mask mask("scalar");
  try {
    const Updater updater(1, Isa::avx512);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::config);
    const std::string message = error.what();
    EXPECT_NE(message.find("avx512"), std::string::npos) << message;
    EXPECT_NE(message.find("scalar"), std::string::npos) << message;
  }
}

TEST(Isas, MisspeltMaskIsReportedWithItsName) {
  const Mask mask("avx3");
  try {
    available();
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("BALLAST_ISA_MASK"), std::string::npos);
  }
}

}  // namespace
}  // namespace ballast::cpu_adam
