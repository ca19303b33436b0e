#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/schedule/build.h"
#include "ballast/schedule/labels.h"
#include "ballast/schedule/rank_sizes.h"

#include "src/schedule/arguments.h"
#include "src/schedule/head_operations.h"
#include "src/schedule/layout.h"
#include "src/schedule/movements.h"
#include "src/schedule/reference_passes.h"
#include "src/schedule/tile_operations.h"

namespace ballast::schedule {
namespace {

using model::Kernel;
using model::Port;

/// Spreads `count` events evenly over `steps` steps.
class Spread {
 public:
  Spread(std::uint32_t count, std::uint32_t steps) : count_(count), steps_(steps) {}
  /// Whether the next event is due in step `at` or earlier. In the last step all are.
  [[nodiscard]] bool due(std::uint32_t at) const {
    if (given_ == count_) return false;
    return at + 1 == steps_ || std::uint64_t{given_} * steps_ <= std::uint64_t{at} * count_;
  }
  [[nodiscard]] std::uint32_t next() const { return given_; }
  std::uint32_t take() { return given_++; }

 private:
  std::uint32_t count_;
  std::uint32_t steps_;
  std::uint32_t given_ = 0;
};

/// Builds the plan of one run operation by operation.
class StepBuilder {
 public:
  StepBuilder(const std::string& name, const Workload& workload, const Placement& placement,
              const Options& options, const Layout& layout, std::uint32_t micro_batches)
      : work_(workload),
        options_(options),
        layout_(layout),
        micro_batches_(micro_batches),
        move_(name, workload, placement, options, layout, micro_batches),
        tiles_(workload, layout, move_),
        head_(workload, placement, layout, move_),
        reference_(workload, layout, move_, tiles_, head_, micro_batches),
        ahead_of_backward_(move_.states_ahead(UpdatedIn::backward), blocks()),
        ahead_of_forward_(move_.states_ahead(UpdatedIn::forward),
                          blocks() - workload.first_differentiated),
        inputs_(micro_batches, kNoBuffer) {}

  Plan training_step(bool applies_updates) {
    applies_updates = applies_updates && leaves_updates();
    applies_updates_ = applies_updates;
    if (!applies_updates) move_.omit_updates_of_forward();
    for (std::uint32_t m = 0; m < micro_batches_; ++m) move_.upload_batch(m);
    passes();
    const OpId gate = move_.gate(true);
    Plan plan = move_.finish();
    plan.gate = gate;
    plan.applies_updates = applies_updates;
    plan.leaves_updates = leaves_updates();
    head_.mark(plan);
    return plan;
  }

  /// Whether gated updates wait for the next step.
  [[nodiscard]] bool leaves_updates() const {
    for (std::uint32_t b = 0; b < blocks(); ++b) {
      if (move_.is_updated_in(UpdatedIn::forward, b)) return true;
    }
    return false;
  }

  Plan flush() {
    for (std::uint32_t b = 0; b < blocks(); ++b) {
      if (move_.is_updated_in(UpdatedIn::forward, b)) move_.update(b, 1);
    }
    Plan plan = move_.finish();
    plan.applies_updates = true;
    return plan;
  }

  Plan rollback() {
    std::uint32_t first = 0;
    while (first < blocks() && !move_.speculates(first)) ++first;
    if (first == blocks()) return {};
    // In the order of the next forward pass, so that it may begin. States that were fetched ahead
    // come first, because repetitions use their buffers.
    for (const bool ahead : {true, false}) {
      for (std::uint32_t b = 0; b < blocks(); ++b) {
        const bool pending = move_.is_updated_in(UpdatedIn::forward, b);
        if ((pending && move_.has_states_ahead(b)) != ahead) continue;
        if (pending || move_.speculates(b)) move_.update(b, 1);
      }
    }
    Plan plan = move_.finish();
    plan.applies_updates = true;
    return plan;
  }

  Plan fill(Homes homes) {
    for (std::uint32_t b = 0; b < blocks(); ++b) move_.fill(b, homes);
    move_.fill_activations();
    move_.fill_gradients();
    return move_.finish();
  }

  Plan read(std::uint32_t first, std::uint32_t count, Homes homes) {
    for (std::uint32_t b = first; b < first + count; ++b) move_.read(b, homes);
    return move_.finish();
  }

  Plan evaluation() {
    for (std::uint32_t m = 0; m < micro_batches_; ++m) move_.upload_batch(m);
    for (const Micros& micros : groups()) {
      move_.begin_passes(micros.begin);
      for (std::uint32_t b = 0; b < work_.head(); ++b) {
        for_each(micros, [&](std::uint32_t m) { forward(b, m, false); });
      }
      evaluate_head(micros);
    }
    const OpId done = move_.gate(false);
    Plan plan = move_.finish();
    plan.gate = done;
    return plan;
  }

 private:
  [[nodiscard]] std::uint32_t blocks() const {
    return static_cast<std::uint32_t>(work_.blocks.size());
  }
  /// Micro-batches that pass a block before the next block's turn.
  struct Micros {
    std::uint32_t begin = 0;
    std::uint32_t end = 0;
    bool last = true;  ///< of the step
    [[nodiscard]] bool first() const { return begin == 0; }
  };
  [[nodiscard]] bool layer_major() const { return options_.order == Order::layer_major; }
  [[nodiscard]] std::vector<Micros> groups() const {
    if (layer_major()) return {{0, micro_batches_}};
    std::vector<Micros> groups;
    for (std::uint32_t m = 0; m < micro_batches_; ++m) {
      groups.push_back({m, m + 1, m + 1 == micro_batches_});
    }
    return groups;
  }
  template <class Work>
  static void for_each(const Micros& micros, const Work& work) {
    for (std::uint32_t m = micros.begin; m < micros.end; ++m) work(m);
  }

  void passes() {
    // With one micro-batch at a time, the sums of all blocks are open at once.
    if (!layer_major()) clear_gradients(0, blocks());
    for (const Micros& micros : groups()) {
      move_.begin_passes(micros.begin);
      std::uint32_t arrived = 0;
      for (std::uint32_t b = 0; b < work_.head(); ++b) {
        const Movements::Range ahead = move_.experts_ahead(b);
        // Weights that move ahead are updated before that.
        for (; arrived < std::max(b + 1, ahead.end); ++arrived) arrive(arrived, micros);
        for (std::uint32_t e = ahead.begin; e < ahead.end; ++e) move_.prefetch_expert(e);
        for_each(micros, [&](std::uint32_t m) { forward(b, m, true); });
      }
      if (head_.in_one_pass()) {
        train_head(micros);
      } else {
        train_head_by_tiles(micros);
      }
      for (std::uint32_t b = work_.head(); b-- > work_.first_differentiated;) {
        if (work_.is_layer(b)) prepare_backward(b, micros);
        if (layer_major()) clear_gradients(b, b + 1);
        for_each(micros, [&](std::uint32_t m) { backward(b, m); });
        if (micros.last) finish_gradient(b);
      }
    }
  }

  /// The tiles of half a layer need the result of its norm again.
  void prepare_backward(std::uint32_t block, const Micros& micros) {
    if (!work_.blocks[block].continues || work_.last_tile(block) != block) return;
    const std::uint32_t norm = work_.first_tile(block);
    if (work_.blocks[norm].mid_layer && !move_.keeps_input(norm)) {
      recompute_half(work_.first_tile(norm - 1), micros);
    }
    for_each(micros, [&](std::uint32_t m) {
      const BufferId input = move_.input_for_backward(norm, m);
      if (work_.blocks[norm].routes) return tiles_.route(norm, m, input, Visit::again);
      tiles_.normalize(norm, m, input, false);
    });
  }

  /// The first half of a layer, for the input of the second.
  void recompute_half(std::uint32_t norm, const Micros& micros) {
    for_each(micros, [&](std::uint32_t m) {
      tiles_.normalize(norm, m, move_.input_for_backward(norm, m), true);
    });
    const std::uint32_t last = work_.last_tile(norm);
    for (std::uint32_t tile = norm + 1; tile <= last; ++tile) {
      for_each(micros, [&](std::uint32_t m) {
        const BufferId out = tile == last ? move_.place_for_input(last + 1, m) : kNoBuffer;
        tiles_.forward(tile, m, out);
      });
    }
  }

  /// What precedes the first pass through a block.
  void arrive(std::uint32_t block, const Micros& micros) {
    if (micros.first()) update_before_forward(block);
    if (micros.last) fetch_ahead_of_backward(block);
  }

  void evaluate_head(const Micros& micros) {
    if (head_.tiles() == 1) {
      return for_each(micros, [&](std::uint32_t m) {
        reference_.evaluate_head(m);
        head_.evaluate(m, inputs_[m]);
      });
    }
    for_each(micros, [&](std::uint32_t m) { normalize_for_head(m); });
    for (std::uint32_t t = 0; t < head_.tiles(); ++t) {
      for_each(micros, [&](std::uint32_t m) { scan_head(t, m); });
    }
    if (work_.has_reference()) return;
    for_each(micros, [&](std::uint32_t m) { head_.end(m, inputs_[m], false); });
  }

  void normalize_for_head(std::uint32_t m) {
    reference_.normalize_for_head(m);
    tiles_.normalize(work_.head(), m, inputs_[m], false);
  }
  void scan_head(std::uint32_t tile, std::uint32_t m) {
    reference_.scan_head(tile, m);
    head_.scan(tile, m);
  }

  void train_head(const Micros& micros) {
    for (std::uint32_t b = work_.head(); b < blocks(); ++b) arrive(b, micros);
    if (layer_major()) clear_gradients(work_.head(), blocks());
    for_each(micros, [&](std::uint32_t m) {
      reference_.evaluate_head(m);
      head_.train(m, inputs_[m]);
    });
    for (std::uint32_t b = blocks(); micros.last && b-- > work_.head();) finish_gradient(b);
  }

  /// Ends with the first block, which has the norm.
  void train_head_by_tiles(const Micros& micros) {
    const std::uint32_t norm = work_.head();
    arrive(norm, micros);
    for_each(micros, [&](std::uint32_t m) { normalize_for_head(m); });
    for (std::uint32_t t = 0; t < head_.tiles(); ++t) {
      if (!work_.tied && t > 0) arrive(norm + t, micros);
      for_each(micros, [&](std::uint32_t m) { scan_head(t, m); });
    }
    for (std::uint32_t t = head_.tiles(); t-- > 0;) {
      const std::uint32_t block = work_.tied ? norm : norm + t;
      if (layer_major() && (!work_.tied || t == 0)) clear_gradients(block, block + 1);
      for_each(micros, [&](std::uint32_t m) { head_.differentiate(t, m); });
      if (micros.last && block != norm) finish_gradient(block);
    }
    for_each(micros, [&](std::uint32_t m) { head_.end(m, inputs_[m], true); });
    if (micros.last) finish_gradient(norm);
  }

  void update_before_forward(std::uint32_t block) {
    if (applies_updates_ && move_.is_updated_in(UpdatedIn::forward, block)) move_.update(block, 1);
  }

  /// Fetches states for the first updates of a pass during the pass before it. Those that find no
  /// free buffer follow at the next block.
  void fetch_states_ahead(UpdatedIn pass, Spread& ahead, std::uint32_t at) {
    while (ahead.due(at) && move_.has_room_ahead(pass, ahead.next())) {
      move_.fetch_states_ahead(pass, ahead.take());
    }
  }
  void fetch_ahead_of_backward(std::uint32_t block) {
    fetch_states_ahead(UpdatedIn::backward, ahead_of_backward_, block);
  }

  void finish_gradient(std::uint32_t block) {
    move_.deliver_gradient(block);
    if (move_.update_pass(block) == UpdatedIn::backward) move_.update(block, 0);
    fetch_states_ahead(UpdatedIn::forward, ahead_of_forward_, blocks() - 1 - block);
  }

  void forward(std::uint32_t block, std::uint32_t m, bool training) {
    if (work_.is_part_of_layer(block)) return forward_part(block, m, training);
    const BufferId in = inputs_[m];
    reference_.forward(block, m, in);
    const BufferId weights = move_.weights_on_device(block);
    const bool embedding = work_.is_embedding(block);
    // All tiles of the embedding write to the same buffer.
    const BufferId out =
        work_.blocks[block].continues ? in : move_.place_for_input(work_.last_tile(block) + 1, m);
    std::vector<Use> uses = {{role_of(Port::weights), weights, false},
                             {role_of(Port::output), out, true}};
    Bytes traffic = 0;
    if (reads_batch(block)) uses.push_back({role_of(Port::batch), layout_.batch_device[m], false});
    if (embedding) {
      traffic = 2 * work_.activation_bytes / work_.vocabulary_tiles;  // rows read and written
    } else {
      uses.push_back({role_of(Port::input), in, false});
      uses.push_back({role_of(Port::workspace), layout_.workspace, true});
      if (training) use_intermediates(uses, block, m);
      traffic = work_.blocks[block].norm_traffic;
    }
    move_.compute(embedding ? Kernel::embed : Kernel::layer, block, m, std::move(uses),
                  work_.blocks[block].forward_flops, traffic);
    if (training && !embedding) move_.store_input(block, m, in);
    inputs_[m] = out;
  }
  /// A tile of a layer, or the norm before some.
  void forward_part(std::uint32_t block, std::uint32_t m, bool training) {
    if (!work_.blocks[block].continues) {
      if (work_.blocks[block].routes) {
        tiles_.route(block, m, inputs_[m], training ? Visit::training : Visit::evaluation);
      } else {
        tiles_.normalize(block, m, inputs_[m], true);
      }
      if (training) move_.store_input(block, m, inputs_[m]);
      return;
    }
    const bool last = work_.last_tile(block) == block;
    const BufferId out = last ? move_.place_for_input(block + 1, m) : kNoBuffer;
    tiles_.forward(block, m, out);
    if (last) inputs_[m] = out;
  }

  /// Clears the sums of blocks [begin, end).
  void clear_gradients(std::uint32_t begin, std::uint32_t end) {
    for (std::uint32_t b = begin; b < end; ++b) {
      if (work_.blocks[b].is_frozen()) continue;
      Operation clear = {.action = Action::clear,
                         .payload = Payload::gradient,
                         .block = b,
                         .traffic = work_.blocks[b].cleared_bytes,
                         .uses = {{Role::target, layout_.accumulator[b], true}}};
      // With one micro-batch at a time, no router has chosen yet.
      if (layer_major()) move_.add_condition(clear, move_.for_gradient(b));
      move_.emit(std::move(clear));
    }
  }

  void backward(std::uint32_t block, std::uint32_t m) {
    const BlockWork& work = work_.blocks[block];
    // Nothing reads the gradient of the tokens.
    if (work_.is_embedding(block) && work.is_frozen()) return;
    if (work_.is_part_of_layer(block)) {
      if (work_.blocks[block].continues) return tiles_.backward(block, m);
      return tiles_.norm_backward(block, m, move_.input_for_backward(block, m));
    }
    std::vector<Use> uses = {
        {role_of(Port::activation_gradient), layout_.flow[move_.place_among(m)], true}};
    move_.use_accumulator(uses, block);
    double flops = work.backward_flops();
    Bytes traffic = 0;
    if (reads_batch(block)) uses.push_back({role_of(Port::batch), layout_.batch_device[m], false});
    if (work_.is_embedding(block)) {
      // Rows read, fp32 rows read and written.
      traffic = 5 * work_.activation_bytes / work_.vocabulary_tiles;
    } else {
      uses.push_back({role_of(Port::weights), move_.weights_on_device(block), false});
      uses.push_back({role_of(Port::input), move_.input_for_backward(block, m), false});
      uses.push_back({role_of(Port::workspace), layout_.workspace, true});
      traffic = work.norm_traffic;
      if (!use_intermediates(uses, block, m)) {
        flops += work.recomputed_flops;
        traffic += work.norm_traffic;
      }
    }
    const bool embedding = work_.is_embedding(block);
    move_.compute(embedding ? Kernel::embed_backward : Kernel::layer_backward, block, m,
                  std::move(uses), flops, traffic);
    const bool tied = work_.trains_tied() && embedding;
    if (tied && !head_.in_one_pass()) head_.differentiate_tied(block, m);
  }

  /// The embedding reads tokens, layers the positions of packed documents.
  [[nodiscard]] bool reads_batch(std::uint32_t block) const {
    return work_.is_embedding(block) || work_.packed;
  }

  /// False when the block keeps none. The backward pass overwrites them.
  bool use_intermediates(std::vector<Use>& uses, std::uint32_t block, std::uint32_t m) {
    const BufferId kept = move_.intermediates(block, m);
    if (kept != kNoBuffer) uses.push_back({role_of(Port::kept), kept, true});
    return kept != kNoBuffer;
  }

  using Visit = TileOperations::Visit;

  const Workload& work_;
  const Options& options_;
  const Layout& layout_;
  std::uint32_t micro_batches_;
  bool applies_updates_ = false;
  Movements move_;
  TileOperations tiles_;
  HeadOperations head_;
  ReferencePasses reference_;
  Spread ahead_of_backward_;      ///< states for the backward pass of this step
  Spread ahead_of_forward_;       ///< states for the forward pass of the next one
  std::vector<BufferId> inputs_;  ///< per micro-batch: the activation that the next block reads
};

}  // namespace

Schedule build(const Workload& workload, const Placement& placement, const Options& options) {
  check_arguments(workload, placement, options);
  Layout layout = make_layout(workload, placement, options);
  const auto builder = [&](const std::string& name, std::uint32_t micro_batches) {
    return StepBuilder(name, workload, placement, options, layout, micro_batches);
  };
  Schedule schedule;
  schedule.ranks = workload.world;
  schedule.ranks_in_group = RankSizes(workload).group();
  schedule.micro_batch_tokens = workload.micro_batch_tokens;
  if (options.purpose == Purpose::training) {
    schedule.first = builder("first training step", workload.micro_batches).training_step(false);
    schedule.steady = builder("training step", workload.micro_batches)
                          .training_step(schedule.first.leaves_updates);
    schedule.flush = builder("updates", 0).flush();
    schedule.rollback = builder("rollback", 0).rollback();
  }
  schedule.evaluation = builder("evaluation", workload.evaluation_micro_batches).evaluation();
  if (!layout.weight_staging.empty()) schedule.weight_staging = layout.weight_staging.front();
  if (!layout.state_staging.empty()) schedule.state_staging = layout.state_staging.front();
  if (!layout.activation_staging.empty()) {
    schedule.activation_staging = layout.activation_staging.front();
  }
  if (!layout.gradient_staging.empty()) {
    schedule.gradient_staging = layout.gradient_staging.front();
  }
  schedule.batch_host = std::move(layout.batch_host);
  schedule.workspace = layout.workspace;
  schedule.weight_home = std::move(layout.weight_home);
  schedule.trained_home = std::move(layout.trained_home);
  schedule.state_home = std::move(layout.state_home);
  schedule.buffers = std::move(layout.buffers);
  return schedule;
}

std::vector<Buffer> list_buffers(const Workload& workload, const Placement& placement,
                                 const Options& options) {
  check_arguments(workload, placement, options);
  return std::move(make_layout(workload, placement, options).buffers);
}

std::vector<Buffer> sum_buffers(const Workload& workload, const Placement& placement,
                                const Options& options) {
  check_arguments(workload, placement, options);
  return merged_buffers(workload, placement, options);
}

Plan build_partial_step(const Workload& workload, const Placement& placement,
                        const Options& options, std::uint32_t micro_batches, bool applies_updates) {
  check_arguments(workload, placement, options);
  check_trains(options);
  if (micro_batches == 0 || micro_batches > workload.micro_batches) {
    refuse_arguments(fmt::format("a partial step needs 1 to {} micro-batches, got {}",
                                 workload.micro_batches, micro_batches));
  }
  const Layout layout = make_layout(workload, placement, options);
  return StepBuilder("training step", workload, placement, options, layout, micro_batches)
      .training_step(applies_updates);
}

Plan build_fill(const Workload& workload, const Placement& placement, const Options& options,
                Homes homes) {
  check_arguments(workload, placement, options);
  const Layout layout = make_layout(workload, placement, options);
  return StepBuilder("initial fill", workload, placement, options, layout, 0).fill(homes);
}

Plan build_read(const Workload& workload, const Placement& placement, const Options& options,
                std::uint32_t first, std::uint32_t count, Homes homes) {
  check_arguments(workload, placement, options);
  if (first > workload.blocks.size() || count > workload.blocks.size() - first) {
    refuse_arguments(fmt::format("the model has {} blocks; cannot read {} from block {} on",
                                 workload.blocks.size(), count, first));
  }
  const Layout layout = make_layout(workload, placement, options);
  return StepBuilder("reading", workload, placement, options, layout, 0).read(first, count, homes);
}

}  // namespace ballast::schedule
