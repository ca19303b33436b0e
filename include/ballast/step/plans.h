#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ballast/core/places.h"
#include "ballast/plan/plan.h"
#include "ballast/step/problem.h"

namespace ballast::step {

/// Builds the schedule. A pure function. Throws Error(config) if the placement or the options are
/// invalid (wrong number of blocks, too few slots, speculation with eager updates; for
/// Purpose::evaluation, a block that places more than its weights).
plan::Schedule build(const Problem& problem, const Placement& placement, const Options& options);

/// Plans of training over the buffers of build() in which no block speculates: first, steady and
/// flush as in plan::Schedule.
struct GatedPlans {
  plan::Plan first;
  plan::Plan steady;
  plan::Plan flush;
};

/// Builds them, for a placement with speculating blocks and gated updates. They may follow rollback
/// or the flush of the schedule, and first of the schedule may follow their flush.
GatedPlans build_gated_plans(const Problem& problem, const Placement& placement,
                             const Options& options);

/// Builds only the buffers and the step `steady`, which are enough to simulate a run after its
/// first steps. A planner does this for hundreds of placements.
plan::Schedule build_steady_step(const Problem& problem, const Placement& placement,
                                 const Options& options);

/// Returns the buffers of build() without its plans: the memory that a placement needs.
std::vector<plan::Buffer> list_buffers(const Problem& problem, const Placement& placement,
                                       const Options& options);

/// Sums the buffers of list_buffers() in whole pages: one unnamed buffer per tier, kind
/// and device. A planner calls it thousands of times.
std::vector<plan::Buffer> sum_buffers(const Problem& problem, const Placement& placement,
                                      const Options& options);

/// Builds a training step over the same buffers with fewer micro-batches (1 to the problem's), for
/// the last, partial batch of an epoch. `applies_updates`: it follows another gated step.
/// `speculates`: blocks speculate as placed; false: as in build_gated_plans().
plan::Plan build_partial_step(const Problem& problem, const Placement& placement,
                              const Options& options, std::uint32_t micro_batches,
                              bool applies_updates, bool speculates = true);

/// Builds the first plan of a training run. The host operation `initialize` makes the values of
/// every block's weights and states, in pieces in ascending order, and copies move them to their
/// homes. Writes all NVMe homes, including those of activations and gradients.
plan::Plan build_fill(const Problem& problem, const Placement& placement, const Options& options,
                      Homes homes = {});

/// Builds a plan that copies weights and states of `count` blocks, starting with block `first`, to
/// the host for the operation `read`: a block's weights, then its states, each in pieces in
/// ascending order.
plan::Plan build_read(const Problem& problem, const Placement& placement, const Options& options,
                      std::uint32_t first, std::uint32_t count, Homes homes = {});

/// Names of plans' operations for messages and traces; see Names.
class OperationNames {
 public:
  /// `problem`: of the plans. It must outlive the object.
  explicit OperationNames(const Problem& problem) : problem_(&problem) {}

  /// Returns "backward of layer 3, micro-batch 1".
  std::string operator()(const plan::Operation& operation) const;
  /// Returns "backward" or "upload weights".
  [[nodiscard]] static std::string kind_of(const plan::Operation& operation);
  /// Number of devices of the plans.
  [[nodiscard]] std::uint32_t devices() const { return problem_->devices; }
  [[nodiscard]] const std::string& block_of(const plan::Operation& operation) const {
    return problem_->program().blocks.at(operation.block).name;
  }

 private:
  const Problem* problem_;
};

}  // namespace ballast::step
