#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ballast/plan/plan.h"

#include "src/step/plan_types.h"
#include "tests/support/named_operation.h"
#include "tests/unit/step/random_workload.h"

namespace ballast::step::named {

/// The meaning of the content of a buffer.
struct Content {
  enum class What : std::uint8_t {
    nothing,
    /// number: updates applied; micro: sub-groups to which one more was applied
    weights,
    states,            ///< of sub-group `micro`; number: updates applied
    batch,             ///< number: run
    activation,        ///< input of `block`; number: run
    intermediates,     ///< of `block`; number: run
    flow,              ///< gradient of the input of `block`; number: run
    accumulator,       ///< micro: micro-batches added so far; number: run
    tied_accumulator,  ///< the same, of tile `block`
    normed,            ///< result of the norm in `block`; number: run
    head_rows,         ///< the same of the head; `block`: tiles scanned so far; number: run
    routing,           ///< of the router in `block`; micro: micro-batches so far; number: run
    routing_of_ranks,  ///< the same of all ranks
    router_totals,     ///< `block`: the last router that was added; number: run
    output_sums,      ///< `block`: the last one that was added, the norm's or a tile's; number: run
    normed_gradient,  ///< `block`: the last one that was added, from the end; number: run
    packed,           ///< gradient of this rank's micro-batches; number: run
    reduced,          ///< gradient over all ranks; number: run
    statistics,       ///< number: run
    losses,           ///< micro: micro-batches so far; number: run
    verdict           ///< number: run
  };
  enum class Extent : std::uint8_t {
    whole,
    shard,      ///< one rank's shard
    torn,       ///< the whole, but only this rank's shard is up to date
    share,      ///< one rank's part of weights that a group of ranks holds together
    torn_share  ///< the same, but only this rank's shard is up to date
  };
  What what = What::nothing;
  std::uint32_t block = 0;
  std::uint32_t micro = 0;
  std::uint64_t number = 0;
  Extent extent = Extent::whole;
  bool undone = false;        ///< made by an update that a rollback undoes
  bool trained_only = false;  ///< of weights: the frozen ones behind the trained ones are others
  bool frozen_only = false;   ///< of weights: those before the frozen ones are others
  bool decoded = false;       ///< of weights that are kept as codes
  friend bool operator==(const Content&, const Content&) = default;
};

/// Runs plans in serial order and tracks the content of every buffer. It knows the meaning of each
/// operation but not how plans are built. An operation that finds the wrong content (another
/// block's weights, another version, a gradient that lacks a micro-batch), or writes more than its
/// buffer holds, is reported.
class Interpreter {
 public:
  Interpreter(const TestProblem& problem, const Schedule& schedule);

  void run(const Plan& plan);
  /// Checks after the last run that every update is done and all data is in its home.
  void finish();

  [[nodiscard]] const std::vector<std::string>& complaints() const { return complaints_; }

 private:
  using What = Content::What;
  using Extent = Content::Extent;

  void perform(const Operation& op);
  void move_weights(const Operation& op);
  void decode(const Operation& op);
  void move_frozen(const Operation& op);
  /// Whether the frozen weights of `block`, trained in part, have a home of their own.
  [[nodiscard]] bool splits_home(std::uint32_t block) const;
  [[nodiscard]] bool trained_on_host(std::uint32_t block) const;
  [[nodiscard]] bool undoes_on_host(std::uint32_t block) const {
    return problem_.placement.blocks[block].weights != Tier::nvme || trained_on_host(block);
  }
  [[nodiscard]] Content frozen_weights(std::uint32_t block) const;
  [[nodiscard]] Content weights_in_piece(const Operation& op) const;
  /// What the homes of the weights of `block` hold after `updates`.
  [[nodiscard]] std::vector<std::pair<BufferId, Content>> weight_homes(std::uint32_t block,
                                                                       std::uint64_t updates) const;
  void move_states(const Operation& op);
  void gather(const Operation& op);
  void codes(const Operation& op);
  void batch_of(const Operation& op);
  void forward(const Operation& op);
  void head(const Operation& op);
  void normalize(const Operation& op);
  void tile_forward(const Operation& op);
  void tile_backward(const Operation& op);
  void norm_backward(const Operation& op);
  void route(const Operation& op);
  void offload_routing(const Operation& op);
  void need_expert(const Operation& op);
  void expert_backward(const Operation& op);
  void router_backward(const Operation& op);
  /// Of this rank or, if `any_rank`, of any.
  [[nodiscard]] bool has_rows(std::uint32_t block, std::uint32_t micro, std::uint64_t run,
                              bool any_rank) const;
  /// Of any of the run's micro-batches.
  [[nodiscard]] bool has_rows_in_run(std::uint32_t block, std::uint64_t run, std::uint32_t micros,
                                     bool any_rank) const;
  /// Whether the last training step updates the block.
  [[nodiscard]] bool was_touched(std::uint32_t block) const;
  void gather_routing(const Operation& op);
  [[nodiscard]] std::uint32_t previous_router(std::uint32_t block) const;
  [[nodiscard]] std::uint32_t last_router() const;
  /// Finds the routings of `micros` micro-batches in host memory.
  void need_routing(const Operation& op, std::uint32_t micros);
  bool holds(const Operation& op, const Condition& condition);
  /// Whether the operation's conditions leave it nothing to do.
  bool is_idle(const Operation& op);
  /// What it leaves then.
  void rest(const Operation& op);
  [[nodiscard]] bool expects_zeros(const Operation& op) const;
  void scan_head(const Operation& op);
  void differentiate_head(const Operation& op);
  void end_head(const Operation& op);
  void add_losses(const Operation& op);
  void add_gradient(const Operation& op);
  [[nodiscard]] bool is_trained(std::uint32_t block) const {
    return !work_.blocks[block].sub_groups.empty();
  }
  /// Whether the output matrix's tile of that number has a gradient.
  [[nodiscard]] bool trains_tile(std::uint32_t tile) const {
    return work_.tied ? work_.tied_accumulator_bytes > 0
                      : work_.blocks[work_.block_of_tile(tile)].frozen_flops == 0.0;
  }
  void add_to(const Operation& op, const Use& use, What what, std::uint32_t block);
  [[nodiscard]] std::uint32_t tile_of(const Operation& op) const {
    return op.block - (work_.tied ? 0 : work_.head());
  }
  void clear(const Operation& op);
  void backward(const Operation& op);
  void use_up_intermediates(const Operation& op);
  [[nodiscard]] bool keeps(const Operation& op) const;
  [[nodiscard]] bool trains() const { return problem_.options.purpose == Purpose::training; }
  void pack(const Operation& op);
  void reduce(const Operation& op);
  void offload_gradient(const Operation& op);
  void gate(const Operation& op);
  void undo_speculative_updates();
  void undo(const Operation& op);
  void keep_old(const Operation& op, Role home, Role undo);
  void update(const Operation& op);
  void initialize(const Operation& op);
  void read(const Operation& op);

  /// Whether several ranks have the block in common.
  [[nodiscard]] bool several(std::uint32_t block) const;
  /// Of the data that this rank updates.
  [[nodiscard]] Extent own(std::uint32_t block) const;
  /// Of reduced gradients that replace packed ones.
  [[nodiscard]] Extent sums(std::uint32_t block) const;
  /// Of a block's weights where they live.
  [[nodiscard]] Extent home(std::uint32_t block) const;
  /// The same when only this rank's shard is up to date.
  [[nodiscard]] Extent torn_home(std::uint32_t block) const;
  [[nodiscard]] std::uint32_t group() const;
  [[nodiscard]] Content weights(std::uint32_t block, Extent extent) const;
  /// The states of the sub-group of `op` before its next update.
  [[nodiscard]] Content states(const Operation& op) const;
  /// What an update of the sub-group of `op` leaves of weights that it found.
  [[nodiscard]] Content updated(const Operation& op, Content weights) const;
  [[nodiscard]] Content of_run(What what, const Operation& op, std::uint32_t micro = 0) const;
  [[nodiscard]] Content gradient(const Operation& op, std::uint64_t run, Extent extent) const;
  void need_shard(const Operation& op, Role role, bool shard);
  [[nodiscard]] Bytes size(const Content& content) const;
  [[nodiscard]] Bytes size_in(const Buffer& buffer, const Content& content) const;
  [[nodiscard]] Bytes part_of(Bytes whole, Extent extent, std::uint32_t block) const;

  void copy(const Operation& op, Role from, Role to, const Content& content);
  void current_weights_in_use(const Operation& op, std::uint32_t block);
  void need(const Operation& op, Role role, const Content& content);
  void put(const Operation& op, Role role, const Content& content);
  void pass(const Operation& op, Role role);
  void complain(const Operation& op, const std::string& what);

  const TestProblem& problem_;
  const Workload& work_;
  const Problem program_ = with_program(work_);  ///< for names
  const Schedule& schedule_;
  std::vector<Content> held_;                  ///< by buffer
  std::vector<std::uint64_t> updates_;         ///< of whole blocks
  std::vector<std::uint64_t> due_;             ///< by the training steps before the current run
  std::vector<std::uint32_t> updated_groups_;  ///< by block: in the update that is under way
  std::vector<std::string> complaints_;
  std::uint64_t run_ = 0;
  std::uint64_t last_training_run_ = 0;
  std::uint32_t last_micro_batches_ = 0;  ///< of that run
  const Plan* plan_ = nullptr;
  bool training_ = false;   ///< whether the current run is a training step
  bool filling_ = false;    ///< whether it is the initial fill
  bool in_pieces_ = false;  ///< whether it fills or reads data that may pass smaller buffers
  std::size_t seen_uses_ = 0;
};

}  // namespace ballast::step::named
