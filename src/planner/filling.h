#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "ballast/core/places.h"
#include "ballast/engine/run_inputs.h"
#include "ballast/memory/ledger.h"
#include "ballast/memory/machine.h"
#include "ballast/step/problem.h"

namespace ballast::planner {

using step::PlacementConstraint;

/// Returns one constraint per block of a model with `blocks` blocks. Throws Error(config) for a
/// rule about a block that does not exist.
std::vector<PlacementConstraint> read_constraints(const engine::Constraints& constraints,
                                                  std::size_t blocks);
/// Returns the constraints for the model of `run`.
inline std::vector<PlacementConstraint> read_constraints(const engine::RunInputs& run) {
  return read_constraints(run.constraints, run.model.blocks.size());
}

/// The tensors that a step moves to a faster tier.
enum class TensorClass : std::uint8_t {
  weights,
  optimizer,
  both,  ///< weights and optimizer states of a block together
  activations,
  gradients,      ///< to host memory; a recipe with such a step starts with them on NVMe
  intermediates,  ///< intermediates of layers: kept on the device, whatever the tier of the step
  attention,      ///< results of attention: kept where the activations of the block are
  logits,  ///< logits of a head with several tiles: kept on the device, if the tiles' weights are
           ///< there
  /// Everything open, to the tiers with the smallest excess over the budgets, whatever the tier and
  /// limit of the step. Slow: for runs that no other step fits.
  all
};

/// The order in which a step places blocks if not all fit.
enum class BlockOrder : std::uint8_t {
  first,   ///< first those that the forward pass needs first
  last,    ///< first those that the backward pass needs first
  spread,  ///< evenly over the model, so that the transfers of the others are evenly spread
};

/// One step of filling the tiers: places all blocks that fit, at most `limit`.
struct PlacementStep {
  TensorClass kind = TensorClass::weights;
  Tier tier = Tier::host;
  BlockOrder order = BlockOrder::first;
  std::size_t limit = std::numeric_limits<std::size_t>::max();
};

using PlacementRecipe = std::vector<PlacementStep>;

/// Describes what the search of one run varies in its options.
std::string describe(const step::Options& options);

/// Returns whether open gradients are on NVMe if the recipe does not move them.
bool swaps_gradients(const PlacementRecipe& recipe);

/// For runs that set everything else. The backward pass needs the last layers' intermediates
/// first.
inline PlacementRecipe keep_intermediates() {
  return {{.kind = TensorClass::logits, .tier = Tier::device},
          {.kind = TensorClass::intermediates, .tier = Tier::device, .order = BlockOrder::last}};
}

/// Returns `placement` with `count` speculating blocks, evenly spread over the blocks with states
/// below the device, or with all of these if there are fewer.
step::Placement with_speculation(step::Placement placement, std::size_t count);

/// Results that trials of one problem share, by a description of the question. Thread-safe.
template <class Value>
class Memo {
 public:
  [[nodiscard]] std::optional<Value> find(const std::string& question) const {
    const std::scoped_lock lock(mutex_);
    const auto known = found_.find(question);
    return known == found_.end() ? std::nullopt : std::optional(known->second);
  }
  void add(const std::string& question, const Value& value) {
    const std::scoped_lock lock(mutex_);
    found_.emplace(question, value);
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<std::string, Value> found_;
};

/// Places the blocks of one problem within budgets. Open tensors start on NVMe, and the moves of a
/// recipe take them to faster tiers.
class TierFiller {
 public:
  /// All arguments must outlive the filler. `speculating`: see with_speculation(); applies to every
  /// placement that it makes or judges.
  TierFiller(const step::Problem& problem, const std::vector<PlacementConstraint>& constraints,
             const memory::Budgets& budgets, std::size_t speculating)
      : problem_(problem),
        constraints_(constraints),
        budgets_(budgets),
        speculating_(speculating) {}

  /// `moved` (may be null) receives the number of blocks that each step placed.
  [[nodiscard]] step::Placement fill(const PlacementRecipe& recipe, const step::Options& options,
                                     std::vector<std::size_t>* moved = nullptr) const;
  /// Returns the bytes above the budgets of host and devices together; 0 if the placement fits.
  [[nodiscard]] Bytes excess(const step::Placement& placement, const step::Options& options) const;
  [[nodiscard]] memory::Ledger ledger(const step::Placement& placement,
                                      const step::Options& options) const;

 private:
  /// Returns what the run names for the block, if it can keep that, otherwise nothing.
  [[nodiscard]] step::Kept kept_by_default(std::size_t block) const;
  /// Returns the placement with everything open on these tiers.
  [[nodiscard]] step::Placement uniform(Tier weights, Tier optimizer, Tier activations,
                                        Tier gradients) const;
  /// The memory that a placement leaves.
  struct Headroom {
    std::int64_t room = 0;  ///< the smallest rest of a budget; negative if one is exceeded
    Bytes excess = 0;       ///< see excess()
  };
  [[nodiscard]] Headroom fit(const step::Placement& placement, const step::Options& options) const;
  [[nodiscard]] std::size_t max_that_fit(const step::Placement& placement,
                                         const PlacementStep& step,
                                         const std::vector<std::size_t>& blocks, std::size_t most,
                                         Headroom& now, std::int64_t lacking,
                                         const step::Options& options) const;
  [[nodiscard]] bool has_states(std::size_t block) const {
    return !problem_.blocks[block].is_frozen();
  }
  [[nodiscard]] bool is_open(std::size_t block, TensorClass kind) const;
  /// Also returns whether the block may be on the tier of the step.
  [[nodiscard]] bool is_open(std::size_t block, const PlacementStep& step) const;
  [[nodiscard]] bool is_table(std::size_t block) const;
  /// Returns the placement with tables that are on the device moved to host memory, whatever the
  /// run names.
  [[nodiscard]] step::Placement with_tables_below(step::Placement placement,
                                                  const step::Options& options) const;
  /// Changes open tiers while that lowers the excess. Returns the remaining excess.
  Bytes descend(step::Placement& placement, const step::Options& options) const;
  [[nodiscard]] std::optional<step::Placement> best_of_all(const step::Options& options,
                                                           Tier gradients) const;
  [[nodiscard]] step::Placement nearest(const step::Options& options, Tier gradients) const;
  [[nodiscard]] step::Placement find_nearest(const step::Options& options, Tier gradients) const;
  [[nodiscard]] std::vector<std::size_t> blocks_to_place(const step::Placement& placement,
                                                         const PlacementStep& step) const;
  /// Returns how many of `blocks`, at most `most`, `step` places. `now`: that of `placement`, empty
  /// if unknown; becomes that of the result.
  [[nodiscard]] std::size_t count_to_place(const step::Placement& placement,
                                           const PlacementStep& step,
                                           const std::vector<std::size_t>& blocks, std::size_t most,
                                           std::optional<Headroom>& now,
                                           const step::Options& options) const;
  /// `moves`: describes the options and all steps up to this one.
  std::size_t apply(step::Placement& placement, const PlacementStep& step,
                    const step::Options& options, bool swapping, const std::string& moves,
                    std::optional<Headroom>& now) const;
  [[nodiscard]] std::size_t min_excess(const step::Placement& placement, const PlacementStep& step,
                                       const std::vector<std::size_t>& blocks, std::size_t most,
                                       Headroom& now, const Headroom& all,
                                       const step::Options& options) const;

  const step::Problem& problem_;
  const std::vector<PlacementConstraint>& constraints_;
  const memory::Budgets& budgets_;
  std::size_t speculating_;
  /// Numbers of blocks that moves placed, by the moves up to them: many recipes begin alike.
  mutable Memo<std::size_t> counts_;
  /// Results of nearest(), which tries hundreds of placements.
  mutable Memo<step::Placement> nearest_;
};

}  // namespace ballast::planner
