#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/step/labels.h"
#include "ballast/step/plans.h"

#include "src/model/description/program_draft.h"

namespace ballast::step {

/// Random numbers from a seed.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : random_(seed) {}
  /// A number from `low` to `high`, both included.
  std::uint64_t pick(std::uint64_t low, std::uint64_t high) {
    return low + random_() % (high - low + 1);
  }
  std::uint32_t pick32(std::uint32_t low, std::uint32_t high) {
    return static_cast<std::uint32_t>(pick(low, high));
  }
  bool toss() { return pick(0, 1) == 1; }
  Tier tier() { return kTiers[pick(0, 2)]; }

 private:
  std::mt19937_64 random_;
};

/// The arguments of build().
struct BuildArguments {
  Problem problem;
  Placement placement;
  Options options;
};

inline Schedule build(const BuildArguments& placed) {
  return build(placed.problem, placed.placement, placed.options);
}

/// Elements of a block that is trained in full, and FLOPs of its forward pass.
struct SimpleBlock {
  Elems elements = 2048;
  double flops = 10.0;
};

/// A model of an embedding, layers in one piece and a head, with bf16 weights and AdamW, and
/// activations of 1 KiB. Everything is on the device.
inline BuildArguments simple_problem(const std::vector<SimpleBlock>& blocks,
                                     std::uint32_t micro_batches = 1, Bytes activation = kKiB) {
  model::ProgramShape shape = {.activation = activation, .batch = 512, .losses = 8};
  BuildArguments made;
  for (const SimpleBlock& block : blocks) {
    using model::BlockRole;
    const std::size_t number = shape.blocks.size();
    const BlockRole role = number == 0                  ? BlockRole::embedding
                           : number + 1 < blocks.size() ? BlockRole::layer
                                                        : BlockRole::head;
    shape.blocks.push_back({.name = fmt::format("block {}", number),
                            .role = role,
                            .forward_flops = block.flops,
                            .recomputed_flops = block.flops,
                            .intermediates = 7 * activation,
                            .gradient = 4 * block.elements,
                            .layer = static_cast<std::uint32_t>(number == 0 ? 0 : number - 1)});
    made.problem.blocks.push_back(
        {.weight_bytes = 2 * block.elements,
         .gradient_bytes = 2 * block.elements,
         .sub_groups = {{10 * block.elements, 2 * block.elements, 26 * block.elements}}});
  }
  made.problem.index = std::make_shared<const ProgramIndex>(model::write_program(shape));
  made.problem.statistics_bytes = 16;
  made.problem.workspace_bytes = 8192;
  made.problem.micro_batch_tokens = 128;
  made.problem.micro_batches = micro_batches;
  made.placement.blocks.resize(blocks.size());
  return made;
}

/// A simple_problem() of equal blocks.
inline BuildArguments equal_blocks(std::size_t blocks, std::uint32_t micro_batches = 1,
                                   BlockPlacement placement = {}) {
  BuildArguments made = simple_problem(std::vector<SimpleBlock>(blocks), micro_batches);
  made.placement.blocks.assign(blocks, placement);
  return made;
}

/// Features of a random problem in addition to training on one rank.
struct Draw {
  bool ranks = false;       ///< several ranks, in any stage
  bool devices = false;     ///< 1 to 4 devices
  bool evaluation = false;  ///< only weights are placed
};

/// Draws sizes that no model has, with every kind of block, the blocks that are trained, and to
/// which part, and a placement and options.
class ProblemDraw {
 public:
  ProblemDraw(std::uint64_t seed, Draw draw)
      : dice_(seed),
        more_dice_(seed + 1),
        table_dice_(seed + 2),
        order_dice_(seed + 3),
        router_dice_(seed + 4),
        draw_(draw) {}

  BuildArguments make() {
    ranks();
    blocks();
    freeze();
    sizes();
    model::StepProgram program = model::write_program(shape_);
    share_values(program);
    problem().index = std::make_shared<const ProgramIndex>(std::move(program));
    options();
    if (draw_.devices) devices();
    placement();
    return std::move(made_);
  }

 private:
  using Role = model::BlockRole;

  [[nodiscard]] Problem& problem() { return made_.problem; }

  void ranks() {
    problem().micro_batches = dice_.pick32(1, 5);
    problem().evaluation_micro_batches = dice_.pick32(1, problem().micro_batches);
    problem().micro_batch_tokens = 128;
    problem().statistics_bytes = 16;
    problem().workspace_bytes = 8192;
    if (!draw_.ranks) return;
    problem().sharers = shape_.ranks = dice_.pick32(2, 9);
    problem().stage = dice_.pick32(0, 3);
    problem().qwz_weight_bytes = dice_.toss() ? 2 : 0;
    const std::uint32_t group = dice_.pick32(2, problem().sharers);
    if (problem().sharers % group == 0) problem().hpz_partition_size = group;
    expert_ = dice_.toss() ? Role::exchanged_expert : Role::expert;
  }

  void add(Role role) {
    const bool embeds = role == Role::embedding;
    shape_.blocks.push_back({.name = fmt::format("block {}", shape_.blocks.size()),
                             .role = role,
                             .forward_flops = embeds ? 0.0 : 100.0,
                             .recomputed_flops = embeds ? 0.0 : 60.0,
                             .token_share = role == expert_ ? 0.25 : 1.0,
                             .layer = layer_,
                             .alike = static_cast<std::uint32_t>(shape_.blocks.size())});
  }

  /// In a third of the problems the vocabulary is cut; in a quarter layers are cut or have experts.
  /// In a quarter of the rest some layers have tables.
  void blocks() {
    shape_.tied = dice_.toss();
    const std::uint64_t tiles = dice_.pick(0, 2) == 0 ? dice_.pick(2, 3) : 1;
    const bool cuts = dice_.pick(0, 3) == 0;
    const bool tables = table_dice_.pick(0, 3) == 0 && !cuts;
    for (std::uint64_t t = 0; t < tiles; ++t) add(Role::embedding);
    for (std::uint64_t layer = dice_.pick(0, cuts ? 2 : 5); layer-- > 0; ++layer_) {
      const std::uint64_t kind = cuts ? dice_.pick(0, 3) : 0;
      if (kind == 0) add(Role::layer);
      if (kind == 0 && tables && table_dice_.toss()) add(Role::table);
      if (kind == 1) half(Role::norm, Role::tile);
      if (kind == 2) {
        half(Role::norm, Role::tile);
        half(Role::mid_norm, Role::tile);
      }
      if (kind == 3) experts();
    }
    add(Role::head);
    // With several tensor places a tile of the output matrix has a separate block.
    shape_.tensor = draw_.ranks && !has_experts() ? dice_.pick32(1, 3) : 1;
    problem().tensor = shape_.tensor;
    problem().partitions_activations = shape_.tensor > 1 && dice_.toss();
    if (shape_.tied || !shape_.visits_tiles()) return;
    for (std::uint64_t t = 0; t < tiles; ++t) add(Role::head_tile);
  }
  [[nodiscard]] bool has_experts() const {
    return std::ranges::any_of(shape_.blocks,
                               [](const auto& block) { return block.role == Role::router; });
  }
  void half(Role first, Role tile) {
    add(first);
    for (std::uint64_t t = dice_.pick(1, 2); t-- > 0;) add(tile);
  }
  void experts() {
    if (dice_.toss()) add(Role::layer);
    add(Role::router);
    if (dice_.toss()) add(Role::shared_expert);
    const std::uint32_t count = dice_.pick32(1, 3);
    for (std::uint32_t e = 0; e < count; ++e) {
      add(expert_);
      shape_.blocks.back().expert = e;
    }
  }

  /// In half of the problems some blocks are frozen, sometimes all at the start, so that the
  /// backward pass is shorter, and some in part. Either all tiles of the output matrix are frozen
  /// or none. If all are, the block with the norm may train only the norm, and a tied embedding
  /// only its positions.
  void freeze() {
    const auto count = static_cast<std::uint32_t>(shape_.blocks.size());
    const bool freezes = dice_.toss();
    const bool output = !freezes || dice_.toss();
    const std::uint32_t below = freezes && dice_.toss() ? dice_.pick32(0, count - 1) : 0;
    const std::uint32_t chosen = dice_.pick32(below, count - 1);
    std::uint32_t first = count;
    for (std::uint32_t b = count; b-- > 0;) {
      model::BlockShape& block = shape_.blocks[b];
      const bool has_output =
          shape_.tied ? block.role == Role::embedding : b >= shape_.block_of_tile(0);
      const bool trained =
          !freezes || (has_output && output) || (b == 0 && first == count) ||
          (block.role != Role::head_tile && (b == chosen || (b > below && dice_.toss())));
      const Elems elements = dice_.pick(1, 20) * 2048;
      const bool in_part = freezes && elements > 2048 && dice_.pick(0, 2) == 0 &&
                           block.role != Role::table;  // it has one tensor
      const Elems some = in_part ? dice_.pick(1, elements / 2048 - 1) * 2048 : elements;
      if (trained) first = b;
      if (!trained || (has_output && !output)) block.frozen_flops = block.forward_flops;
      block.gradient = trained ? 4 * some : 0;
      block.cleared = block.gradient / 4;
      problem().blocks.push_back(
          {.weight_bytes = 2 * elements, .gradient_bytes = block.gradient / 2});
      block.by_token = trained && !in_part && block.role == Role::embedding;
      if (block.by_token) block.gradient /= 8;
    }
    std::reverse(problem().blocks.begin(), problem().blocks.end());
    shape_.tied_gradient = shape_.tied && output ? 4096 : 0;
    if (first < shape_.first_layer()) first = 0;
    first = std::min(first, shape_.head());
    while (first > shape_.first_layer() && first < shape_.head() &&
           (shape_.continues(first) || shape_.blocks[first].role == Role::mid_norm)) {
      --first;
    }
    shape_.first_differentiated = first;
  }

  void sizes() {
    shape_.activation = dice_.pick(1, 16) * 1024;
    shape_.rows = dice_.pick(1, 16) * 1024;
    shape_.partial_sums = dice_.pick(1, 16) * 1024;
    shape_.positions = dice_.toss();
    shape_.batch = 512;
    shape_.routing = 64;
    shape_.router_totals = 128;
    shape_.losses = 8;
    shape_.router_losses = 16;
    const bool routes = std::ranges::find(shape_.blocks, Role::router, &model::BlockShape::role) !=
                        shape_.blocks.end();
    shape_.counts_step = routes && router_dice_.toss();
    const bool whole = std::all_of(
        shape_.blocks.begin(), shape_.blocks.end(),
        [](const auto& block) { return block.role <= Role::layer || block.role >= Role::head; });
    const std::uint32_t first = shape_.first_differentiated;
    shape_.row_sums = shape_.sum_scratch = 4096;
    shape_.pairs =
        shape_.tensor == 1 && whole && first > 0 && first < shape_.head() && dice_.toss();
    shape_.pair_results = shape_.pairs ? 256 : 0;
    for (std::size_t b = 0; b < problem().blocks.size(); ++b)
      size(shape_.blocks[b], problem().blocks[b]);
  }
  void size(model::BlockShape& shape, BlockSizes& block) {
    if (shape.role == Role::table) {
      shape.selected = table_dice_.pick(1, 8) * 256;
      shape.row_gradients = shape.is_frozen() ? 0 : 2 * shape.selected;
    }
    shape.intermediates = 7 * shape_.activation;
    shape.kept_attention = more_dice_.pick(0, 3) * shape_.activation;
    shape.attention_flops = shape.forward_flops / 4.0;
    shape.attention_output_flops = shape.forward_flops / 2.0;
    const bool in_part = block.gradient_bytes < block.weight_bytes;
    const bool layer = shape.role != Role::embedding && shape.role < Role::head;
    const bool quantized = layer && in_part && dice_.toss() && shape.selected == 0;
    if (quantized) block.dequantized_bytes = block.weight_bytes * dice_.pick(2, 4);
    block.replicated = draw_.ranks && (quantized || (in_part && !shape.is_frozen()) ||
                                       dice_.pick(0, 3) == 0 || shape.selected > 0);
    // In half of the problems, states are cut into sub-groups.
    const Elems elements = block.gradient_bytes / 2;
    const Elems most = dice_.toss() ? elements : dice_.pick(1, 20) * 2048;
    for (Elems left = elements; left > 0; left -= std::min(left, most)) {
      const Elems part = std::min(left, most);
      block.sub_groups.push_back({10 * part, 2 * part, 26 * part});
    }
  }

  /// Lets layers read a value of an earlier layer in both passes, and add to its gradient. No model
  /// does that yet: only the program describes it.
  void share_values(model::StepProgram& program) {
    std::vector<model::BlockId> layers;
    for (model::BlockId b = shape_.first_differentiated; b < shape_.head(); ++b) {
      if (shape_.blocks[b].role == Role::layer) layers.push_back(b);
    }
    if (layers.size() < 3 || shape_.pairs || dice_.toss()) return;
    const auto add = [&](const std::string& name) {
      program.classes.push_back({.name = name, .word = name, .bytes = 128});
      program.values.push_back({.name = name,
                                .of = static_cast<model::ClassId>(program.classes.size() - 1),
                                .owner = layers.front()});
      return static_cast<model::ValueId>(program.values.size() - 1);
    };
    const model::ValueId value = add("shared keys and values");
    const model::ValueId gradient = add("gradient of shared keys and values");
    for (model::Pass& pass : program.passes) {
      using model::OperandAccess;
      const bool backward = pass.kernel == model::Kernel::layer_backward;
      if (pass.block < layers.front() || (!backward && pass.kernel != model::Kernel::layer))
        continue;
      const auto bind = [&](model::Port port, model::ValueId id, OperandAccess access) {
        pass.operands.push_back(
            {.port = port, .kind = model::OperandKind::value, .number = id, .access = access});
      };
      const bool source = pass.block == layers.front();
      // Ports that layers in one piece do not use.
      bind(model::Port::routing, value,
           source && !backward ? OperandAccess::writes : OperandAccess::reads);
      if (!backward) continue;
      bind(model::Port::router_totals, gradient,
           source                        ? OperandAccess::reads
           : pass.block == layers.back() ? OperandAccess::writes
                                         : OperandAccess::updates);
    }
  }

  void options() {
    Options& options = made_.options;
    options.purpose = draw_.evaluation ? Purpose::evaluation : Purpose::training;
    options.order = dice_.toss() ? Order::layer_major : Order::micro_batch_major;
    if (options.order != Order::layer_major && order_dice_.toss()) {
      options.order = Order::micro_batch_major_offload;
    }
    if (shape_.counts_step) options.order = Order::layer_major;
    options.update = dice_.toss() ? Update::gated : Update::eager;
    options.expert_updates = dice_.toss() ? ExpertUpdates::active : ExpertUpdates::all;
    options.prefetches_experts = dice_.toss();
    options.buffers = {.weight_slots = dice_.pick32(1, 3),
                       .gradient_slots = dice_.pick32(1, 2),
                       .weight_staging = dice_.pick32(1, 4),
                       .state_staging = dice_.pick32(1, 4),
                       .activation_staging = dice_.pick32(1, 4),
                       .gradient_staging = dice_.pick32(1, 4)};
  }

  /// Several devices in half of the problems, all of which then have layer-major order. Leaves the
  /// other draws unchanged.
  void devices() {
    Dice dice = dice_;
    constexpr std::array<std::uint32_t, 6> kDevices = {1, 1, 1, 2, 3, 4};
    problem().devices = kDevices[dice.pick(0, kDevices.size() - 1)];
    if (problem().devices > 1) made_.options.order = Order::layer_major;
  }

  void placement() {
    const std::uint64_t speculating = dice_.pick(0, 4);  // none, few, half, most, all of them
    const bool on_device = dice_.pick(0, 3) == 0;        // for a head in one pass
    for (std::size_t b = 0; b < problem().blocks.size(); ++b) {
      const Tier fastest = shape_.blocks[b].selected > 0 ? Tier::host : Tier::device;
      BlockPlacement place = {.weights =
                                  std::max(on_device ? Tier::device : dice_.tier(), fastest)};
      if (!draw_.evaluation) {
        place.optimizer = std::max(dice_.tier(), fastest);
        place.activations = dice_.tier();
        const Kept some = more_dice_.toss() ? Kept::attention : Kept::all;
        place.kept = dice_.toss() ? some : Kept::nothing;
        place.gradients = dice_.toss() ? Tier::nvme : Tier::host;
        place.speculates = dice_.pick(1, 4) <= speculating && place.optimizer != Tier::device &&
                           made_.options.update == Update::gated;
      }
      made_.placement.blocks.push_back(place);
    }
  }

  Dice dice_;
  Dice more_dice_;    ///< for what attention keeps
  Dice table_dice_;   ///< for tables
  Dice order_dice_;   ///< for the two micro-batch-major orders
  Dice router_dice_;  ///< for router losses of the whole step
  Draw draw_;
  Role expert_ = Role::expert;
  std::uint32_t layer_ = 0;  ///< layers so far
  model::ProgramShape shape_;
  BuildArguments made_;
};

inline BuildArguments random_problem(std::uint64_t seed, Draw draw = {}) {
  return ProblemDraw(seed, draw).make();
}

/// A problem of any kind, with one device or several.
inline BuildArguments any_problem(std::uint64_t seed, bool devices = false) {
  return random_problem(seed,
                        {.ranks = seed % 4 == 3, .devices = devices, .evaluation = seed % 8 >= 6});
}

/// Plans in the order of a training loop: the initial fill, then steps, sometimes with fewer
/// micro-batches, evaluations and reads of all states, with flushes where pending updates must be
/// applied, and rollbacks after some steps. Speculation pauses for some steps. For
/// Purpose::evaluation only fill, evaluations and reads.
struct RunSequence {
  std::deque<Plan> partial;  ///< plans outside the schedule
  std::vector<const Plan*> runs;
};

inline RunSequence random_runs(const BuildArguments& placed, const Schedule& schedule,
                               std::uint64_t seed, std::size_t count) {
  const auto& [problem, placement, options] = placed;
  Dice dice(seed + 7'000'001);
  Dice pace(seed + 8'000'009);
  RunSequence sequence;
  const bool speculates = !schedule.rollback.operations.empty();
  if (speculates) {
    GatedPlans gated = build_gated_plans(problem, placement, options);
    for (Plan* plan : {&gated.first, &gated.steady, &gated.flush}) {
      sequence.partial.push_back(std::move(*plan));
    }
  }
  bool paused = false;
  bool waiting = false;
  const auto flush = [&] {
    if (waiting) sequence.runs.push_back(paused ? &sequence.partial[2] : &schedule.flush);
    waiting = false;
  };
  const auto add = [&](Plan plan) {
    sequence.partial.push_back(std::move(plan));
    sequence.runs.push_back(&sequence.partial.back());
  };
  add(build_fill(problem, placement, options));
  while (sequence.runs.size() <= count) {
    if (speculates && pace.pick(0, 2) == 0) {
      flush();
      paused = !paused;
    }
    const bool trains = options.purpose == Purpose::training;
    const auto what = trains ? dice.pick(0, 6) : 6 * dice.pick(0, 1);
    if (what == 6) {
      flush();
      const auto blocks = static_cast<std::uint32_t>(problem.blocks.size());
      add(build_read(problem, placement, options, 0, blocks));
      continue;
    }
    if (what == 0) {
      flush();
      sequence.runs.push_back(&schedule.evaluation);
      continue;
    }
    if (what == 1) flush();
    if (what == 2) {
      add(build_partial_step(problem, placement, options, dice.pick32(1, problem.micro_batches),
                             waiting, !paused));
    } else if (paused) {
      sequence.runs.push_back(&sequence.partial[waiting ? 1 : 0]);
    } else {
      sequence.runs.push_back(waiting || !schedule.steady.leaves_updates ? &schedule.steady
                                                                         : &schedule.first);
    }
    waiting = sequence.runs.back()->leaves_updates;
    if (speculates && dice.pick(0, 2) == 0 && !paused) {
      sequence.runs.push_back(&schedule.rollback);
      waiting = false;
    }
  }
  flush();
  return sequence;
}

}  // namespace ballast::step
