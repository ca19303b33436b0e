#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/core/random.h"
#include "ballast/data/loader.h"
#include "ballast/engine/engine.h"
#include "ballast/setup/setup.h"

#include "src/train/step_rules.h"
#include "tests/support/documents.h"
#if defined(BALLAST_EMULATED_GPU)
#include "tests/support/fake_cuda.h"
#endif

namespace ballast::test {

/// Number of token ids in the data below.
constexpr std::uint64_t kIds = 131;

/// Inputs of a step, an equal number of targets, and positions if it is packed.
struct Batch {
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> targets;
  std::vector<std::int32_t> positions = {};
  std::vector<std::int32_t> whole_positions = {};  ///< see data::Batch

  [[nodiscard]] engine::TokenBatch view() const {
    return {tokens, targets, positions, whole_positions};
  }
};

/// Function that makes batch number `number` with the given number of tokens.
using Data = std::function<Batch(std::size_t tokens, std::uint64_t number)>;

/// Ids in random order with unequal frequencies; a model can learn only the frequencies.
inline Batch scattered_ids(std::size_t tokens, std::uint64_t number) {
  const auto ids = [tokens](std::uint64_t stream) {
    std::vector<std::int32_t> out(tokens);
    for (std::size_t i = 0; i < tokens; ++i) {
      const auto word = random_u64(7, i, stream);
      out[i] = static_cast<std::int32_t>((word % kIds) * ((word >> 32) % kIds) / kIds);
    }
    return out;
  };
  return {ids(2 * number), ids(2 * number + 1)};
}

/// A chain in which each id is followed by one of four, all equally likely: a perfect model's loss
/// is ln 4.
inline Batch chained_ids(std::size_t tokens, std::uint64_t number) {
  Batch batch;
  std::uint64_t id = number % kIds;
  for (std::size_t i = 0; i < tokens; ++i) {
    batch.tokens.push_back(static_cast<std::int32_t>(id));
    id = (5 * id + 17 + random_u64(9, i, number) % 4) % kIds;
    batch.targets.push_back(static_cast<std::int32_t>(id));
  }
  return batch;
}

/// Divides the sequences of `length` tokens of a batch into documents. A third of the targets does
/// not count.
inline Batch with_documents(Batch batch, std::size_t length, std::uint64_t number) {
  batch.positions = packed_positions(batch.tokens.size() / length, length, number);
  for (std::size_t i = 0; i < batch.targets.size(); ++i) {
    if (random_u64(number, i) % 3 == 0) batch.targets[i] = -1;
  }
  return batch;
}

/// The sequences of one of `places` data places.
inline Batch part_of(const Batch& all, std::size_t place, std::size_t places) {
  const auto part = [&](const std::vector<std::int32_t>& whole) {
    const std::size_t size = whole.size() / places;
    const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(place * size);
    return std::vector<std::int32_t>(begin, begin + static_cast<std::ptrdiff_t>(size));
  };
  return {part(all.tokens), part(all.targets), part(all.positions)};
}

/// This rank's part of the batch.
inline Batch part_of(const Batch& all, const comm::Ranks* ranks) {
  return ranks == nullptr ? all : part_of(all, ranks->rank(), ranks->world());
}

/// This rank's part of the batch, which may be a part of each sequence.
inline Batch part_of(const Batch& all, const engine::Blueprint& blueprint) {
  const Mesh& mesh = blueprint.mesh;
  Batch own = part_of(all, mesh.data_place(), mesh.data);
  data::Batch cut;
  cut.tokens = own.tokens;
  cut.targets = own.targets;
  cut.positions = own.positions;
  cut.reduce(blueprint.shape.whole_length(), {mesh.sequence, mesh.sequence_place()});
  return {cut.tokens, cut.targets, cut.positions, cut.whole_positions};
}

/// The results of a run, bit for bit.
struct Outcome {
  std::vector<double> losses;       ///< loss per step
  std::vector<double> evaluations;  ///< after every `evaluate_every` steps
  std::vector<double> norms;        ///< -1 if the step was skipped
  std::vector<double> scales;       ///< loss scale per step
  std::uint64_t states = 0;
  bool operator==(const Outcome&) const = default;
};

inline void expect_same(const Outcome& outcome, const Outcome& expected, const std::string& name) {
  EXPECT_EQ(outcome.losses, expected.losses) << name;
  EXPECT_EQ(outcome.evaluations, expected.evaluations) << name;
  EXPECT_EQ(outcome.norms, expected.norms) << name;
  EXPECT_EQ(outcome.scales, expected.scales) << name;
  EXPECT_EQ(outcome.states, expected.states) << name;
}

/// In fp16, the initial loss scale is too high, so that the first step is skipped.
inline const std::vector<std::string> kFp16 = {"bf16.enabled=false", "fp16.enabled=true",
                                               "fp16.initial_scale_power=20", "fp16.hysteresis=1",
                                               "fp16.loss_scale_window=2"};

/// Trains `steps` steps with the config's learning rate after a warm-up of 5 steps, with documents
/// if the config packs them. Only a dynamic loss scale may skip steps. With `ranks`, their batches
/// together are the batch of a run with one rank. `hash_of` hashes the states at the end; without
/// it the hash depends on the number of ranks.
inline Outcome train(const config::Config& config, std::uint64_t steps, const Data& data,
                     comm::Ranks* ranks = nullptr, std::uint64_t evaluate_every = 10,
                     const std::function<std::uint64_t(engine::Engine&)>& hash_of = {}) {
  constexpr std::uint64_t kHeldOut = 500;
  engine::Engine engine = setup::make_engine(config, nullptr, ranks);
  engine.start();
  Outcome outcome;
  train::LossScaler loss_scaler(config);
  const std::size_t tokens = engine.blueprint().problem.tokens_per_step();
  const std::size_t evaluated = engine.evaluation_micro_batches() *
                                engine.blueprint().shape.tokens() *
                                engine.blueprint().mesh.sharers();
  const auto batch_of = [&](std::size_t size, std::uint64_t number) {
    const engine::Blueprint& blueprint = engine.blueprint();
    Batch batch = data(size, number);
    if (blueprint.packed) batch = with_documents(batch, blueprint.shape.whole_length(), number);
    return part_of(batch, blueprint);
  };
  const Batch held_out = batch_of(evaluated, kHeldOut);
#if defined(BALLAST_EMULATED_GPU)
  const FakeCuda::NoAllocation in_steps;
#endif
  for (std::uint64_t step = 1; step <= steps; ++step) {
    const Batch batch = batch_of(tokens, step);
    const double warm = static_cast<double>(std::min<std::uint64_t>(step, 5)) / 5.0;
    const double scale = loss_scaler.scale();
    const engine::StepResult result =
        engine.train_step(batch.view(), config.optimizer.lr * warm, scale);
    EXPECT_TRUE(!result.skipped || loss_scaler.is_dynamic());
    loss_scaler.after_step(step, result.skipped);
    outcome.losses.push_back(result.loss);
    outcome.norms.push_back(result.skipped ? -1.0 : result.grad_norm);
    outcome.scales.push_back(scale);
    if (step % evaluate_every == 0) {
      outcome.evaluations.push_back(engine.evaluate(held_out.view()).loss);
    }
  }
  outcome.states = hash_of ? hash_of(engine) : engine.snapshot().hash();
  return outcome;
}

/// Number of skipped steps.
inline std::ptrdiff_t skipped_steps(const Outcome& outcome) {
  return std::count(outcome.norms.begin(), outcome.norms.end(), -1.0);
}

}  // namespace ballast::test
