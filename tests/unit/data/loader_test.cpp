#include "ballast/data/loader.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "tests/support/expect_error.h"
#include "tests/support/temp_dir.h"

namespace ballast::data::loader_test {
namespace {

using test::expect_error;

/// A source of `count` u16 tokens 0, 1, 2, ... in one file of `dir`.
std::shared_ptr<const TokenSource> counting(const test::TempDir& dir, std::size_t count,
                                            std::uint64_t vocab = 65536) {
  std::string bytes;
  for (std::size_t i = 0; i < count; ++i) {
    bytes += static_cast<char>(i & 0xff);
    bytes += static_cast<char>(i >> 8);
  }
  config::DataSection data;
  data.tokens = {dir.write("counting.bin", bytes)};
  return std::make_shared<const TokenSource>(TokenSource::open(data, vocab));
}

/// Options of a loader of windows and of their order.
struct StreamOptions : LoaderOptions {
  bool shuffle = true;
  std::uint64_t seed = 0;
};

Loader load(const std::shared_ptr<const TokenSource>& source, const TokenSplit& split,
            const StreamOptions& options) {
  return {windows_of(source, split.training, options.length, options.shuffle, options.seed),
          windows_of(source, split.held_out, options.length, false, 0), options};
}

StreamOptions small_options() {
  StreamOptions options;
  options.micro_batches = 2;
  options.sequences = 3;
  options.length = 5;
  options.seed = 7;
  return options;
}

TEST(Loader, PartsOfSequencesLoseNoTokenAndNoTarget) {
  const test::TempDir dir;
  const auto source = counting(dir, 400);
  const TokenSplit split = split_tokens(400, 0.25, 6);
  StreamOptions options = small_options();
  options.length = 6;
  const Loader whole = load(source, split, options);
  for (std::uint64_t part = 0; part < 3; ++part) {
    options.cut = {3, part};
    const Loader loader = load(source, split, options);
    for (const bool evaluates : {false, true}) {
      const Batch all = evaluates ? whole.evaluation().batch(1) : whole.batch(2);
      const Batch own = evaluates ? loader.evaluation().batch(1) : loader.batch(2);
      ASSERT_EQ(own.tokens.size(), all.tokens.size() / 3);
      EXPECT_EQ(own.real_tokens, all.real_tokens);
      EXPECT_TRUE(own.whole_positions.empty()) << "every sequence is one document";
      for (std::size_t i = 0; i < own.tokens.size(); ++i) {
        const std::size_t column = part * 2 + i % 2;
        const std::size_t at = i / 2 * 6 + column;
        EXPECT_EQ(own.tokens[i], all.tokens[at]);
        EXPECT_EQ(own.targets[i], all.targets[at]);
        EXPECT_EQ(own.positions[i], static_cast<std::int32_t>(column));
      }
    }
  }
}

TEST(Batch, PartsOfPackedSequencesKeepThePositionsOfAllTokens) {
  Batch batch;
  batch.tokens = {1, 2, 3, 4, 5, 6, 7, 8};
  batch.targets = {2, 3, 4, -1, 6, 7, 8, 9};
  batch.positions = {0, 0, 1, 2, 0, 1, 2, 3};
  const std::vector<std::int32_t> positions = batch.positions;
  batch.reduce(4, {2, 1});
  EXPECT_EQ(batch.tokens, (std::vector<std::int32_t>{3, 4, 7, 8}));
  EXPECT_EQ(batch.targets, (std::vector<std::int32_t>{4, -1, 8, 9}));
  EXPECT_EQ(batch.positions, (std::vector<std::int32_t>{1, 2, 2, 3}));
  EXPECT_EQ(batch.whole_positions, positions);
}

TEST(SampleOrder, ReadsInOrderAndStartsAgainWithoutShuffle) {
  const SampleOrder order(21, 5, false, 0);
  EXPECT_EQ(order.windows(), 4U);
  for (std::uint64_t n = 0; n < 12; ++n) EXPECT_EQ(order.start(n), n % 4 * 5);
}

TEST(SampleOrder, VisitsEveryWindowOfAnEpochOnce) {
  for (const std::uint64_t tokens : {6U, 11U, 13U, 64U, 1000U, 5004U}) {
    const SampleOrder order(tokens, 5, true, 42);
    for (std::uint64_t epoch = 0; epoch < 3; ++epoch) {
      std::set<std::uint64_t> starts;
      for (std::uint64_t n = 0; n < order.windows(); ++n) {
        const auto start = order.start(epoch * order.windows() + n);
        EXPECT_LE(start + 5 + 1, tokens);
        starts.insert(start);
      }
      ASSERT_EQ(starts.size(), order.windows());
      const auto offset = *starts.begin() % 5;
      for (const auto start : starts) EXPECT_EQ(start % 5, offset);
      EXPECT_LE(*starts.rbegin() - *starts.begin(), (order.windows() - 1) * 5);
    }
  }
}

TEST(SampleOrder, DrawsAnOffsetAndAnOrderForEveryEpoch) {
  const SampleOrder order(10'000, 100, true, 42);
  std::set<std::uint64_t> offsets;
  std::set<std::vector<std::uint64_t>> permutations;
  for (std::uint64_t epoch = 0; epoch < 20; ++epoch) {
    std::vector<std::uint64_t> windows;
    for (std::uint64_t n = 0; n < order.windows(); ++n) {
      windows.push_back(order.start(epoch * order.windows() + n) / 100);
    }
    offsets.insert(order.start(epoch * order.windows()) % 100);
    permutations.insert(windows);
  }
  EXPECT_GT(offsets.size(), 10U);
  EXPECT_EQ(permutations.size(), 20U);
}

TEST(SampleOrder, SpreadsTheFirstSampleOfAnEpochEvenly) {
  // 4 windows, 4000 epochs: 1000 expected for each, standard deviation 27.
  const SampleOrder order(60, 10, true, 3);
  ASSERT_EQ(order.windows(), 4U);
  std::vector<int> counts(4);
  for (std::uint64_t epoch = 0; epoch < 4000; ++epoch) {
    const auto base = epoch * 4;
    std::vector<std::uint64_t> starts;
    for (std::uint64_t n = 0; n < 4; ++n) starts.push_back(order.start(base + n));
    const auto first = *std::min_element(starts.begin(), starts.end());
    ++counts[(starts[0] - first) / 10];
  }
  for (const int count : counts) EXPECT_NEAR(count, 1000, 150);
}

TEST(SampleOrder, HandlesMoreTokensThanMemoryHolds) {
  const SampleOrder order(std::uint64_t{1} << 50, 4096, true, 1);
  const auto start = order.start(123'456'789);
  EXPECT_LT(start, std::uint64_t{1} << 50);
  EXPECT_EQ(start, SampleOrder(std::uint64_t{1} << 50, 4096, true, 1).start(123'456'789));
  EXPECT_NE(start, SampleOrder(std::uint64_t{1} << 50, 4096, true, 2).start(123'456'789));
}

TEST(SampleOrder, RefusesTokensShorterThanAWindow) {
  EXPECT_THROW(SampleOrder(5, 5, true, 0), Error);
  EXPECT_EQ(SampleOrder(6, 5, true, 0).start(3), 0U);
}

TEST(Loader, LaysBatchesOutMicroBatchMajorWithShiftedTargets) {
  const test::TempDir dir;
  const auto source = counting(dir, 200);
  auto options = small_options();
  options.shuffle = false;
  Loader loader = load(source, split_tokens(200, 0.0, 5), options);
  const auto first = loader.next();
  EXPECT_EQ(first.step, 1U);
  ASSERT_EQ(first.tokens.size(), 30U);
  for (int i = 0; i < 30; ++i) {
    EXPECT_EQ(first.tokens[static_cast<std::size_t>(i)], i);
    EXPECT_EQ(first.targets[static_cast<std::size_t>(i)], i + 1);
  }
  EXPECT_EQ(loader.next().tokens.front(), 30);
}

TEST(Loader, GivesTheSameBatchesWhenItStartsLater) {
  const test::TempDir dir;
  const auto source = counting(dir, 300);
  const auto split = split_tokens(300, 0.1, 5);
  auto options = small_options();
  Loader whole = load(source, split, options);
  std::vector<Batch> batches;
  for (int i = 0; i < 20; ++i) batches.push_back(whole.next());
  options.first_step = 8;
  options.prefetch = 5;
  Loader resumed = load(source, split, options);
  for (std::size_t i = 7; i < 20; ++i) {
    const auto batch = resumed.next();
    EXPECT_EQ(batch.step, i + 1);
    EXPECT_EQ(batch.tokens, batches[i].tokens);
    EXPECT_EQ(batch.targets, batches[i].targets);
    EXPECT_EQ(resumed.batch(i + 1).tokens, batches[i].tokens);
  }
}

TEST(Loader, SkipsBatches) {
  const test::TempDir dir;
  const auto source = counting(dir, 300);
  const auto split = split_tokens(300, 0.1, 5);
  auto options = small_options();
  Loader whole = load(source, split, options);
  options.first_step = 4;
  options.skipped = 3;
  Loader later = load(source, split, options);
  for (std::uint64_t step = 4; step < 9; ++step) {
    const auto batch = later.next();
    EXPECT_EQ(batch.step, step);
    EXPECT_EQ(batch.tokens, whole.batch(step + 3).tokens);
  }
}

TEST(Loader, NeverTrainsOnHeldOutTokens) {
  const test::TempDir dir;
  const auto source = counting(dir, 300);
  Loader loader = load(source, split_tokens(300, 0.2, 5), small_options());
  for (int i = 0; i < 50; ++i) {
    for (const auto target : loader.next().targets) EXPECT_LT(target, 240);
  }
}

/// Tokens, then targets, of step `step` of all ranks, rank 0 first.
std::vector<std::int32_t> batch_of_all(const std::shared_ptr<const TokenSource>& source,
                                       StreamOptions options, std::uint64_t world,
                                       std::uint64_t step) {
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> targets;
  options.places = world;
  options.micro_batches /= world;
  for (options.place = 0; options.place < world; ++options.place) {
    const Batch part = load(source, split_tokens(source->size(), 0.1, 5), options).batch(step);
    tokens.insert(tokens.end(), part.tokens.begin(), part.tokens.end());
    targets.insert(targets.end(), part.targets.begin(), part.targets.end());
  }
  tokens.insert(tokens.end(), targets.begin(), targets.end());
  return tokens;
}

TEST(Loader, TheGlobalBatchDoesNotDependOnTheNumberOfRanks) {
  const test::TempDir dir;
  const auto source = counting(dir, 600);
  auto options = small_options();
  options.micro_batches = 12;  // 36 sequences per step, about 106 per epoch: step 3 crosses its end
  for (const bool shuffle : {false, true}) {
    options.shuffle = shuffle;
    for (std::uint64_t step = 1; step <= 5; ++step) {
      const auto alone = batch_of_all(source, options, 1, step);
      ASSERT_EQ(alone.size(), 2U * 36U * 5U);
      for (const std::uint64_t world : {2U, 3U, 4U}) {
        EXPECT_EQ(batch_of_all(source, options, world, step), alone)
            << world << " ranks, step " << step << (shuffle ? ", shuffled" : "");
      }
    }
  }
}

TEST(Loader, GivesNoSequenceOfAStepToTwoRanks) {
  const test::TempDir dir;
  const auto source = counting(dir, 600);
  auto options = small_options();
  options.places = 3;
  std::set<std::int32_t> firsts;
  for (options.place = 0; options.place < 3; ++options.place) {
    const Batch part = load(source, split_tokens(600, 0.0, 5), options).batch(1);
    for (std::size_t i = 0; i < part.tokens.size(); i += 5) firsts.insert(part.tokens[i]);
  }
  EXPECT_EQ(firsts.size(), 18U);
}

/// The held-out micro-batches that all ranks take, in order.
std::vector<std::uint64_t> evaluated(std::uint64_t together, std::uint64_t world,
                                     std::uint64_t wanted, std::uint64_t there) {
  std::vector<std::uint64_t> all;
  const EvaluationShare first = {together, 0, world};
  for (std::uint64_t run = 0; run < first.runs(wanted, there); ++run) {
    for (std::uint64_t rank = 0; rank < world; ++rank) {
      for (std::uint64_t micro = 0; micro < together; ++micro) {
        all.push_back(EvaluationShare{together, rank, world}.index(run, micro, wanted, there));
      }
    }
  }
  return all;
}

TEST(EvaluationShare, TheSameMicroBatchesAreEvaluatedByAnyNumberOfRanks) {
  const auto alone = evaluated(4, 1, 24, 100);
  ASSERT_EQ(alone.size(), 24U);
  for (std::uint64_t i = 0; i < 24; ++i) EXPECT_EQ(alone[i], i);
  EXPECT_EQ(evaluated(2, 2, 24, 100), alone);
  EXPECT_EQ(evaluated(4, 3, 24, 100), alone);
  EXPECT_EQ(evaluated(1, 4, 24, 100), alone);
}

TEST(EvaluationShare, TakesEachMicroBatchOnceAndFillsUpWithPadding) {
  EXPECT_EQ(evaluated(2, 1, 5, 100), (std::vector<std::uint64_t>{0, 1, 2, 3, 4, 100}));
  EXPECT_EQ(evaluated(2, 3, 8, 4), (std::vector<std::uint64_t>{0, 1, 2, 3, 4, 4}));
  EXPECT_EQ(evaluated(4, 1, 8, 1), (std::vector<std::uint64_t>{0, 1, 1, 1}));
  EXPECT_EQ(evaluated(1, 2, 4, 9), (std::vector<std::uint64_t>{0, 1, 2, 3}));
  for (std::uint64_t together = 1; together <= 5; ++together) {
    for (std::uint64_t world = 1; world <= 4; ++world) {
      for (std::uint64_t wanted = 1; wanted <= 12; ++wanted) {
        std::vector<std::uint64_t> all = evaluated(together, world, wanted, 9);
        EXPECT_EQ(all.size() % (together * world), 0U);
        std::erase(all, 9U);
        std::vector<std::uint64_t> each(std::min<std::uint64_t>(wanted, 9));
        std::iota(each.begin(), each.end(), 0);
        EXPECT_EQ(all, each);
      }
    }
  }
}

TEST(Loader, ReadsTheHeldOutPartInOrderForEvaluation) {
  const test::TempDir dir;
  const auto source = counting(dir, 400);
  Loader loader = load(source, split_tokens(400, 0.1, 5), small_options());
  ASSERT_EQ(loader.evaluation().size(), 3U);  // 40 tokens: 7 sequences: 2 whole micro-batches
  const auto batch = loader.evaluation().batch(1);
  EXPECT_EQ(batch.step, 0U);
  ASSERT_EQ(batch.tokens.size(), 15U);
  EXPECT_EQ(batch.tokens.front(), 375);
  EXPECT_EQ(batch.targets.back(), 390);
}

TEST(EvaluationBatches, FillUpTheLastOneOfAStream) {
  const test::TempDir dir;
  const EvaluationBatches batches(windows_of(counting(dir, 400), {360, 40}, 5, false, 0), 3, 5);
  ASSERT_EQ(batches.size(), 3U);  // 7 sequences
  const Batch last = batches.batch(2);
  EXPECT_EQ(last.tokens.front(), 390);
  EXPECT_EQ(last.real_tokens, 5U);
  EXPECT_EQ(last.targets[4], 395);
  EXPECT_EQ(std::count(last.targets.begin(), last.targets.end(), kPaddingTarget), 10);
  EXPECT_TRUE(last.positions.empty());
  const Batch padding = batches.batch(3);
  EXPECT_EQ(std::count(padding.targets.begin(), padding.targets.end(), kPaddingTarget), 15);
  EXPECT_EQ(padding.real_tokens, 0U);
  EXPECT_EQ(EvaluationBatches(nullptr, 3, 5).size(), 0U);
}

TEST(Loader, HasNoEvaluationBatchesWithoutAHeldOutPart) {
  const test::TempDir dir;
  Loader loader = load(counting(dir, 100), split_tokens(100, 0.0, 5), small_options());
  EXPECT_EQ(loader.evaluation().size(), 0U);
}

TEST(Loader, DeliversGoodBatchesFirstAndThenTheErrorEveryTime) {
  const test::TempDir dir;
  auto options = small_options();
  options.shuffle = false;
  options.prefetch = 4;
  Loader loader = load(counting(dir, 200, 65), split_tokens(200, 0.0, 5), options);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the thread finds the error first
  EXPECT_EQ(loader.next().step, 1U);
  EXPECT_EQ(loader.next().step, 2U);
  for (int i = 0; i < 2; ++i) {
    expect_error(ErrorCategory::data, {"counting.bin", "token id 65 at byte 130"},
                 [&] { loader.next(); });
  }
}

TEST(Loader, StopsWhileItsThreadWaitsForRoom) {
  const test::TempDir dir;
  const auto source = counting(dir, 200);
  for (int i = 0; i < 50; ++i) {
    Loader loader = load(source, split_tokens(200, 0.0, 5), small_options());
    if (i % 2 == 0) loader.next();
  }
}

TEST(Loader, RefusesOptionsOutOfRange) {
  const test::TempDir dir;
  const auto source = counting(dir, 200);
  const auto split = split_tokens(200, 0.0, 5);
  auto options = small_options();
  options.place = 1;
  EXPECT_THROW(load(source, split, options), Error);
  options = small_options();
  EXPECT_THROW(load(source, {{0, 201}, {}}, options), Error);
}

}  // namespace
}  // namespace ballast::data::loader_test
