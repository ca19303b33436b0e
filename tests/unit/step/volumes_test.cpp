// Bytes that each lane moves in a run, counted from sizes and options without the builder.

#include <algorithm>
#include <array>

#include <gtest/gtest.h>

#include "ballast/step/labels.h"
#include "ballast/step/program_index.h"

#include "src/step/devices.h"
#include "tests/support/random_problem.h"
#include "tests/unit/step/misses.h"
#include "tests/unit/step/value_devices.h"

namespace ballast::step::volumes_test {
namespace {

using Volumes = std::array<Bytes, plan::kLaneCount>;

/// Counts one run on one rank: the weights that its stops need one after the other, and the data
/// that move with them.
class Counter {
 public:
  explicit Counter(const BuildArguments& placed)
      : problem_(placed.problem),
        program_(placed.problem.program()),
        place_(placed.placement),
        options_(placed.options),
        form_(in_one_pass(problem_, place_) ? model::HeadForm::one_pass : model::HeadForm::visits),
        dealt_(deal(program_, problem_.devices)),
        staging_(options_.buffers.weight_staging),
        decoded_(problem_.devices, Misses(1)) {
    for (std::uint32_t d = 0; d < problem_.devices; ++d) {
      slots_.emplace_back(options_.buffers.weight_slots + moved_for_other_blocks(d));
    }
  }

  Volumes training_step(std::uint32_t micro_batches, bool applies_updates) {
    values(stops_of(program_.training, form_), micro_batches);
    sums(micro_batches - 1);
    for (const model::StepValue& value : program_.values) activations(value, micro_batches);
    for (std::uint32_t b = 0; b < blocks(); ++b) {
      if (!is_trained(b)) continue;
      if (gradient_is_on_nvme(b)) count(Lane::writeback, gradient_on_nvme(b));
      if (const Bytes rows = program_.blocks[b].row_gradients; rows > 0) {
        count(Lane::offload, micro_batches * rows);
        continue;
      }
      count(Lane::offload, problem_.statistics_bytes);
      if (at(b).optimizer != Tier::device) count(Lane::offload, problem_.blocks[b].gradient_bytes);
    }
    const std::uint32_t passes = layer_major() ? 1 : micro_batches;
    together_ = micro_batches / passes;
    for (pass_ = 0; pass_ < passes; ++pass_) {
      go_through(applies_updates && pass_ == 0, pass_ + 1 == passes);
    }
    // A step reads the first states of the gated updates after it, and finds an equal number
    // already there.
    fetch_states_at_once();
    fetch_states(0, ahead());
    if (applies_updates) fetch_states(ahead(), swapped());
    return volumes_;
  }

  Volumes flush() {
    for (std::uint32_t b = 0; b < blocks(); ++b) {
      if (!at_once(b)) update(b, 1);
    }
    fetch_states(ahead(), swapped());
    return volumes_;
  }

  /// Repeats the pending updates and those of speculating blocks, whose weights and states on NVMe
  /// are read from the other slot.
  Volumes rollback() {
    flush();
    for (std::uint32_t b = blocks(); b-- > 0;) {
      if (!at(b).speculates || !is_trained(b)) continue;
      const bool undoes_on_nvme = at(b).weights == Tier::nvme && !trained_on_host(b);
      const bool there = undoes_on_nvme && !staging_.use(b, for_update(b, 1));
      if (there) ADD_FAILURE() << "stale weights are in staging";
      if (undoes_on_nvme) count(Lane::fetch, problem_.blocks[b].weight_bytes);
      if (gradient_is_on_nvme(b)) count(Lane::fetch, gradient_on_nvme(b));
      update(b, 1);
    }
    fetch_states_at_once();
    return volumes_;
  }

  Volumes evaluation() {
    const std::uint32_t micro_batches = problem_.evaluation_micro_batches;
    values(stops_of(program_.evaluation, model::HeadForm::visits), micro_batches);
    together_ = layer_major() ? micro_batches : 1;
    for (pass_ = 0; pass_ < (layer_major() ? 1 : micro_batches); ++pass_) {
      for (const model::Stop& stop : program_.evaluation) weights(stop);
    }
    return volumes_;
  }

 private:
  /// Number of blocks whose weights move for the pass of another block on a device. Each takes one
  /// more slot.
  [[nodiscard]] std::size_t moved_for_other_blocks(std::uint32_t device) const {
    std::size_t most = 0;
    for (const model::Stop* stop : stops_of(program_.training, form_)) {
      for (const model::PassId id : stop->passes) {
        if (dealt_[program_.passes[id].block] != device) continue;
        std::size_t moving = 0;
        for (const model::Operand& operand : program_.passes[id].operands) {
          const bool moves = operand.kind == model::OperandKind::weights &&
                             operand.number != program_.passes[id].block &&
                             at(operand.number).weights != Tier::device;
          moving += moves ? 1 : 0;
        }
        most = std::max(most, moving);
      }
    }
    return most;
  }

  void go_through(bool updates, bool last) {
    ahead_ = model::kNone;
    std::vector<bool> keeps;
    for (const BlockPlacement& block : place_.blocks) keeps.push_back(block.kept == Kept::all);
    Recomputation recomputation(program_, keeps);
    std::uint32_t arrived = 0;
    const std::vector<const model::Stop*> stops = stops_of(program_.training, form_);
    for (auto at = stops.begin(); at != stops.end(); ++at) {
      const model::Stop* const stop = *at;
      const auto [begin, end] = prefetched(*stop);
      std::uint32_t reached = end;
      for_weights(*stop, [&](std::uint32_t b) { reached = std::max(reached, b + 1); });
      for (; arrived < reached; ++arrived) {
        if (updates && !at_once(arrived)) update(arrived, 1);
      }
      for (std::uint32_t e = begin; e < end; ++e) weights(e, before_pass());
      recomputation.before(*stop, [&](const model::Stop& again) { weights(again); });
      weights(*stop);
      if (last && stop->backward && at + 1 != stops.end()) stage_ahead(**(at + 1));
      for (const model::BlockId b : stop->finishes) {
        if (last && at_once(b)) update(b, 0);
      }
    }
  }

  [[nodiscard]] std::uint32_t blocks() const {
    return static_cast<std::uint32_t>(problem_.blocks.size());
  }
  [[nodiscard]] const BlockPlacement& at(std::uint32_t block) const { return place_.blocks[block]; }
  void count(Lane lane, Bytes bytes) { volumes_[static_cast<std::size_t>(lane)] += bytes; }

  [[nodiscard]] bool is_trained(std::uint32_t block) const {
    return !problem_.blocks[block].is_frozen();
  }
  [[nodiscard]] bool gradient_is_on_nvme(std::uint32_t block) const {
    return is_trained(block) && options_.update == Update::gated &&
           at(block).optimizer != Tier::device && at(block).gradients == Tier::nvme;
  }
  /// Size in whole pages.
  [[nodiscard]] Bytes gradient_on_nvme(std::uint32_t block) const {
    return round_up(problem_.blocks[block].gradient_bytes, kPage);
  }

  /// Whether a block is updated in its own backward pass.
  [[nodiscard]] bool at_once(std::uint32_t block) const {
    return options_.update == Update::eager || at(block).speculates;
  }
  [[nodiscard]] bool waits_for_states(std::uint32_t block) const {
    return at(block).optimizer == Tier::nvme && !at_once(block);
  }

  /// Sub-groups with states on NVMe and gated updates.
  [[nodiscard]] std::size_t swapped() const {
    std::size_t found = 0;
    for (std::uint32_t b = 0; b < blocks(); ++b) {
      found += waits_for_states(b) ? problem_.blocks[b].sub_groups.size() : 0;
    }
    return found;
  }
  [[nodiscard]] std::size_t ahead() const {
    return std::min<std::size_t>(swapped(), options_.buffers.state_staging);
  }
  void fetch_states_at_once() {
    for (std::uint32_t b = 0; b < blocks(); ++b) {
      if (at(b).optimizer != Tier::nvme || !at_once(b)) continue;
      count(Lane::fetch, problem_.blocks[b].state_bytes());
    }
  }
  /// The states of the swapped sub-groups number `from` to `to`, in forward order.
  void fetch_states(std::size_t from, std::size_t to) {
    std::size_t number = 0;
    for (std::uint32_t b = 0; b < blocks(); ++b) {
      if (!waits_for_states(b)) continue;
      for (const SubGroup& group : problem_.blocks[b].sub_groups) {
        if (number >= from && number < to) count(Lane::fetch, group.state_bytes);
        ++number;
      }
    }
  }

  /// Inputs of the step, its reports, numbers of rows, and copies between devices.
  void values(const std::vector<const model::Stop*>& stops, std::uint32_t micro_batches) {
    for (model::ValueId v = 0; v < program_.values.size(); ++v) {
      const model::StepValue& value = program_.values[v];
      const model::ValueClass& of = program_.classes[value.of];
      const Bytes bytes = program_.bytes_of(value);
      const auto [writers, readers, copies] = devices_of(program_, v, stops, dealt_);
      if (of.from_host) count(Lane::upload, readers.size() * micro_batches * bytes);
      count(Lane::peer, copies * micro_batches * bytes);
      // The whole report is copied to the host from the device of the head.
      const bool elsewhere = !writers.empty() && !writers.contains(dealt_[program_.head]);
      if (of.buffers == model::BufferRule::report && elsewhere) {
        count(Lane::peer, problem_.micro_batches * bytes);
      }
      if (of.counts) count(Lane::offload, micro_batches * bytes);
      if (of.buffers == model::BufferRule::report)
        count(Lane::offload, problem_.micro_batches * bytes);
    }
  }

  void activations(const model::StepValue& value, std::uint32_t micro_batches) {
    const bool kept =
        value.waits == model::Waits::kept_attention && at(value.owner).kept == Kept::attention;
    if (value.waits != model::Waits::placed && !kept) return;
    Bytes bytes = program_.bytes_of(value);
    if (problem_.partitions_activations && value.waits == model::Waits::placed) {
      bytes = round_up((bytes - 1) / problem_.tensor + 1, kPage);
      count(Lane::gather, micro_batches * (problem_.tensor - 1) * bytes);
    }
    if (at(value.owner).activations == Tier::device) return;
    count(Lane::offload, micro_batches * bytes);
    count(Lane::upload, micro_batches * bytes);
    if (at(value.owner).activations != Tier::nvme) return;
    count(Lane::writeback, micro_batches * round_up(bytes, kPage));
    count(Lane::fetch, micro_batches * round_up(bytes, kPage));
  }

  void sums(std::uint32_t moves) {
    if (options_.order != Order::micro_batch_major_offload) return;
    for (const auto& sum : program_.sums) count(Lane::offload, moves * sum.bytes);
    for (const auto& sum : program_.sums) count(Lane::upload, moves * sum.bytes);
  }
  using When = Misses::When;
  [[nodiscard]] bool layer_major() const { return options_.order == Order::layer_major; }
  [[nodiscard]] When for_pass(std::uint32_t block) const {
    if (!program_.blocks[block].rows) return {};
    return layer_major() ? Misses::kInStep : std::int64_t{pass_};
  }
  [[nodiscard]] When before_pass() const {
    return layer_major() || pass_ == 0 ? Misses::kInStepBefore : std::int64_t{pass_} - 1;
  }
  [[nodiscard]] When for_update(std::uint32_t block, std::uint32_t lag) const {
    const bool all = options_.expert_updates == ExpertUpdates::all;
    if (all || !program_.blocks[block].rows) return {};
    return lag > 0 ? Misses::kInStepBefore : Misses::kInStep;
  }
  /// The experts of a router whose weights are prefetched: their number is that of the buffers that
  /// earlier blocks leave.
  [[nodiscard]] std::pair<std::uint32_t, std::uint32_t> prefetched(const model::Stop& stop) const {
    std::pair<std::uint32_t, std::uint32_t> found = {0, 0};
    const model::Pass& pass = program_.passes[stop.passes.empty() ? 0 : stop.passes.back()];
    if (!options_.prefetches_experts || pass.kernel != model::Kernel::router || stop.backward) {
      return found;
    }
    std::uint32_t passing = 0;
    std::uint32_t fetched = 0;
    for (std::uint32_t b = pass.block; b < program_.head; ++b) {
      const auto& rows = program_.blocks[b].rows;
      if (found.second > 0 && (!rows || program_.values[rows->routing].owner != pass.block)) break;
      passing += at(b).weights != Tier::device ? 1 : 0;
      fetched += at(b).weights == Tier::nvme ? 1 : 0;
      if (passing > options_.buffers.weight_slots || fetched > options_.buffers.weight_staging)
        break;
      if (!rows) continue;
      if (found.second == 0) found.first = b;
      found.second = b + 1;
    }
    return found;
  }

  template <class Handle>
  void for_weights(const model::Stop& stop, const Handle& handle) const {
    for (const model::PassId id : stop.passes) {
      for (const model::Operand& operand : program_.passes[id].operands) {
        const bool rows = operand.kind == model::OperandKind::rows &&
                          operand.access == model::OperandAccess::reads;
        if (rows || operand.kind == model::OperandKind::weights) handle(operand.number);
      }
    }
  }
  void weights(const model::Stop& stop) {
    for_weights(stop, [this](std::uint32_t b) {
      if (program_.blocks[b].selected > 0) return rows(b);
      const bool decodes = problem_.blocks[b].is_quantized();
      if (!decodes || decoded_[dealt_[b]].use(b, for_pass(b))) weights(b, for_pass(b));
    });
  }
  /// Rows of a table are selected before the updates of the stop before.
  void stage_ahead(const model::Stop& stop) {
    for_weights(stop, [this](std::uint32_t b) {
      if (program_.blocks[b].selected == 0) return;
      if (at(b).weights == Tier::nvme) stage(b, {});
      ahead_ = b;
    });
  }
  /// Rows of a table for each micro-batch. The table itself stays below the device.
  void rows(std::uint32_t table) {
    if (at(table).weights == Tier::nvme && table != ahead_) stage(table, {});
    count(Lane::upload, together_ * program_.blocks[table].selected);
  }
  /// A block's weights on the device.
  void weights(std::uint32_t block, When when) {
    if (at(block).weights == Tier::device || !slots_[dealt_[block]].use(block, when)) return;
    if (at(block).weights == Tier::nvme) stage(block, when);
    count(Lane::upload, problem_.blocks[block].weight_bytes);
  }
  void stage(std::uint32_t block, When when) {
    if (!staging_.use(block, when)) return;
    const BlockSizes& work = problem_.blocks[block];
    const Bytes elsewhere = trained_on_host(block) ? work.gradient_bytes : 0;
    count(Lane::fetch, work.weight_bytes - elsewhere);
  }
  /// For a block with frozen weights on NVMe: its trained weights, which are as large as the
  /// gradient, are on NVMe only if their states are.
  [[nodiscard]] bool trained_on_host(std::uint32_t block) const {
    const BlockSizes& work = problem_.blocks[block];
    return at(block).weights == Tier::nvme && at(block).optimizer != Tier::nvme &&
           is_trained(block) && work.gradient_bytes < work.weight_bytes;
  }

  void update(std::uint32_t block, std::uint32_t lag) {
    if (!is_trained(block)) return;
    const BlockPlacement& home = at(block);
    const When when = for_update(block, lag);
    const BlockSizes& work = problem_.blocks[block];
    const Bytes trained = std::min(work.weight_bytes, work.gradient_bytes);
    const bool through_staging = home.weights == Tier::nvme && !trained_on_host(block);
    if (home.optimizer == Tier::device) {
      weights(block, when);
      if (home.weights != Tier::device) count(Lane::offload, trained);
      if (through_staging) staging_.use(block, when);
    } else {
      if (through_staging) stage(block, when);
      if (gradient_is_on_nvme(block) && !at_once(block)) {
        count(Lane::fetch, gradient_on_nvme(block));
      }
      if (home.weights == Tier::device) {
        staging_.use(block, when);
        count(Lane::offload, problem_.blocks[block].gradient_bytes);
        count(Lane::upload, problem_.blocks[block].gradient_bytes);
      }
    }
    if (through_staging) count(Lane::writeback, trained);
    if (home.optimizer == Tier::nvme) count(Lane::writeback, problem_.blocks[block].state_bytes());
  }

  const Problem& problem_;
  const model::StepProgram& program_;
  const Placement& place_;
  const Options& options_;
  model::HeadForm form_;
  std::vector<std::uint8_t> dealt_;  ///< by block
  std::vector<Misses> slots_;        ///< by device
  Misses staging_;
  std::vector<Misses> decoded_;         ///< by device
  std::uint32_t ahead_ = model::kNone;  ///< the table of which rows were selected ahead
  std::uint32_t pass_ = 0;              ///< number of the pass, by groups of micro-batches
  std::uint32_t together_ = 1;          ///< micro-batches in a group
  Volumes volumes_{};
};

Volumes volumes_of(const Plan& plan) {
  Volumes volumes{};
  for (const Lane lane : plan::kLanes)
    volumes[static_cast<std::size_t>(lane)] = plan.bytes_on(lane);
  return volumes;
}

TEST(Volumes, OfEveryPlanFollowFromSizesPlacementAndOrder) {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    const BuildArguments placed = random_problem(seed, {.devices = true});
    const auto& [problem, placement, options] = placed;
    const Schedule schedule = build(placed);
    const bool gated = options.update == Update::gated;
    const std::uint32_t all = problem.micro_batches;
    const std::uint32_t some = 1 + static_cast<std::uint32_t>(seed) % all;
    const auto counter = [&] { return Counter(placed); };
    ASSERT_EQ(volumes_of(schedule.first), counter().training_step(all, false)) << seed;
    ASSERT_EQ(volumes_of(schedule.steady), counter().training_step(all, gated)) << seed;
    ASSERT_EQ(volumes_of(schedule.evaluation), counter().evaluation()) << seed;
    ASSERT_EQ(volumes_of(schedule.flush), gated ? counter().flush() : Volumes{}) << seed;
    bool speculates = false;
    for (std::size_t b = 0; b < problem.blocks.size(); ++b) {
      speculates = speculates || (!problem.blocks[b].is_frozen() && placement.blocks[b].speculates);
    }
    ASSERT_EQ(volumes_of(schedule.rollback), speculates ? counter().rollback() : Volumes{}) << seed;
    const Plan partial = build_partial_step(problem, placement, options, some, seed % 2 == 0);
    ASSERT_EQ(volumes_of(partial), counter().training_step(some, gated && seed % 2 == 0)) << seed;
  }
}

/// All blocks equal, on one tier.
BuildArguments uniform(std::uint32_t world, std::uint32_t stage, Tier optimizer) {
  const std::vector<SimpleBlock> blocks(8, {.elements = world * Elems{4096}});
  BuildArguments placed = simple_problem(blocks);
  placed.problem.sharers = world;
  placed.problem.stage = stage;
  placed.placement.blocks.assign(8, {Tier::device, optimizer, Tier::device});
  return placed;
}

TEST(Volumes, BetweenRanksAreThoseOfTheZeroPaper) {
  for (const std::uint32_t world : {2U, 4U, 64U}) {
    for (std::uint32_t stage = 0; stage <= 3; ++stage) {
      for (const Tier optimizer : kTiers) {
        const BuildArguments problem = uniform(world, stage, optimizer);
        const Plan plan = build(problem).steady;
        // Psi: all weights in the training type, of which a rank already has its own shard.
        const Bytes psi = 8 * problem.problem.blocks[0].weight_bytes;
        const Bytes once = psi - psi / world;
        const Bytes moved = plan.bytes_on(Lane::gather) + plan.bytes_on(Lane::reduce);
        // Sections 7.1 and 7.2 of arXiv 1910.02054: 2 Psi up to stage 2, 3 Psi with stage 3. The
        // embedding's own gradient needs no weights, and the last blocks' weights are still there
        // when the backward pass begins.
        const Bytes block = once / 8;
        const Bytes spared = stage == 3 ? 3 * block : 0;
        EXPECT_EQ(moved, (stage == 3 ? 3 : 2) * once - spared) << world << ' ' << stage;
      }
    }
  }
}

TEST(Volumes, OfGathersOfCodesAreAByteForEveryWeightAndAScaleForEvery256) {
  for (const Bytes width : {2U, 4U}) {
    for (const Tier tier : kTiers) {
      BuildArguments problem = uniform(4, 3, tier);
      constexpr Bytes kElements = 64 * 4096;  // for each rank's shard: its scales are a page
      for (BlockSizes& block : problem.problem.blocks) block.weight_bytes = 4 * width * kElements;
      for (BlockPlacement& place : problem.placement.blocks) place.weights = tier;
      const Plan exact = build(problem).steady;
      problem.problem.qwz_weight_bytes = width;
      const Plan quantized = build(problem).steady;
      const Bytes gathers = exact.bytes_on(Lane::gather) / (3 * width * kElements);
      EXPECT_EQ(gathers, 13U);
      EXPECT_EQ(quantized.bytes_on(Lane::gather), gathers * 3 * (kElements + kElements / 256 * 4));
      for (const Lane lane : {Lane::reduce, Lane::upload, Lane::offload, Lane::writeback}) {
        EXPECT_EQ(quantized.bytes_on(lane), exact.bytes_on(lane));
      }
    }
  }
}

TEST(Volumes, OfWeightsSplitInGroupsLeaveTheGroupOnlyBehindTheUpdate) {
  for (const std::uint32_t group : {2U, 4U, 8U}) {
    for (const Tier tier : kTiers) {
      BuildArguments problem = uniform(8, 3, tier);
      problem.problem.hpz_partition_size = group;
      for (BlockPlacement& place : problem.placement.blocks) place.weights = tier;
      const Schedule schedule = build(problem);
      const Bytes whole = problem.problem.blocks[0].weight_bytes;
      Bytes inside = 0;
      Bytes across = 0;
      for (const Operation& operation : schedule.steady.operations) {
        if (operation.action != Action::gather) continue;
        const bool in_group = operation.buffer(Role::source) != kNoBuffer;
        (in_group ? inside : across) += operation.bytes;
      }
      // Like the backward pass in section 3.2 of arXiv 2306.10209, here also for the forward pass.
      // After the update each share, one of `group`, comes from the ranks that hold the same share.
      EXPECT_EQ(inside, 13 * (whole - whole / group));
      EXPECT_EQ(across, 8 * (whole / group - whole / 8));
      EXPECT_EQ(schedule.steady.bytes_on(Lane::reduce), 8 * (whole - whole / 8));
      Bytes kept = 0;
      for (const Buffer& buffer : schedule.buffers) {
        if (buffer.kind == Kind::weights) kept += buffer.bytes;
      }
      EXPECT_EQ(kept, 8 * whole / group);
    }
  }
}

TEST(Volumes, OfBlocksThatStayWholeInStageThreeAreThoseOfStageTwo) {
  for (const Tier optimizer : kTiers) {
    BuildArguments problem = uniform(4, 3, optimizer);
    for (const auto whole : {0U, 3U, 4U, 7U}) problem.problem.blocks[whole].replicated = true;
    const Plan plan = build(problem).steady;
    // One gather for the update instead of one before each pass. Among the others, the last two are
    // still there when the backward pass begins.
    const Bytes once = problem.problem.blocks[0].weight_bytes / 4 * 3;
    EXPECT_EQ(plan.bytes_on(Lane::reduce), 8 * once);
    EXPECT_EQ(plan.bytes_on(Lane::gather), (8 + 4 - 2) * once);
    std::vector<std::uint32_t> gathered(8, 0);
    for (const Operation& op : plan.operations) gathered[op.block] += op.action == Action::gather;
    EXPECT_EQ(gathered, (std::vector<std::uint32_t>{1, 2, 2, 1, 1, 1, 1, 1}));
  }
}

}  // namespace
}  // namespace ballast::step::volumes_test
