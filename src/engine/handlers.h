#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "ballast/core/dtype.h"
#include "ballast/core/memory.h"
#include "ballast/engine/blueprint.h"
#include "ballast/model/compute.h"
#include "ballast/model/step_program.h"
#include "ballast/plan/plan.h"
#include "ballast/state/store.h"
#include "ballast/step/problem.h"

#include "src/engine/lanes.h"

namespace ballast::engine {

/// The operation that a lane performs, with the data of its plan and its buffers.
struct CurrentOperation {
  using Role = plan::Role;
  using Use = plan::Use;
  using BufferId = plan::BufferId;

  Lanes& lanes;
  const plan::Operation& operation;
  StepContext& context;       ///< context of its plan; see Operation::lag
  const StepContext& before;  ///< context of the preceding plan

  [[nodiscard]] const Modules& modules() const { return lanes.modules(); }
  [[nodiscard]] const Blueprint& blueprint() const { return modules().blueprint; }
  [[nodiscard]] const step::Problem& problem() const { return blueprint().problem; }
  [[nodiscard]] const step::BlockSizes& block_sizes() const {
    return problem().blocks[operation.block];
  }
  [[nodiscard]] step::RankSizes sizes() const { return step::RankSizes(problem()); }
  /// Returns its device, with the device's kernels.
  [[nodiscard]] const DeviceModules& own() const { return modules().devices[operation.device]; }
  [[nodiscard]] model::Compute& compute() const { return own().compute; }
  /// Returns the channels of its device between ranks.
  [[nodiscard]] const Lanes::Channels& channels() const { return lanes.channels(operation.device); }
  /// Returns the stream of its lane.
  [[nodiscard]] device::Stream& stream() const { return lanes.queue_of(operation).stream(); }

  [[nodiscard]] bool has(Role role) const { return operation.buffer(role) != plan::kNoBuffer; }
  /// The buffers that a movement reads and writes: the first of each kind.
  [[nodiscard]] const Use& source() const { return first_use(false); }
  [[nodiscard]] const Use& target() const { return first_use(true); }

  /// Returns the first `bytes` of a buffer, or this rank's shard of that size. On the device also
  /// this tensor place's part.
  [[nodiscard]] HostBytes host(const Use& use, Bytes bytes) const {
    const Bytes start = use.shard ? shard_in(use.role) * bytes : 0;
    return modules().store.host(use.buffer, start + bytes).subspan(start);
  }
  [[nodiscard]] HostBytes host(Role role, Bytes bytes) const {
    return host(operation.use(role), bytes);
  }
  /// Like host(), on the device, and from the operation's offset on.
  [[nodiscard]] DeviceBytes device(const Use& use, Bytes bytes) const {
    const std::uint32_t number = use.shard  ? shard_in(use.role)
                                 : use.part ? blueprint().mesh.tensor_place()
                                            : 0;
    const Bytes start = operation.offset + number * bytes;
    return modules().store.device(use.buffer, start + bytes).subview(start, bytes);
  }
  [[nodiscard]] DeviceBytes device(Role role, Bytes bytes) const {
    return device(operation.use(role), bytes);
  }

  /// Index of this rank's shard in the block, and in the weights that the rank keeps.
  [[nodiscard]] std::uint32_t shard_number() const {
    return sizes().shard_of(blueprint().mesh.sharer());
  }
  [[nodiscard]] std::uint32_t shard_at_home() const {
    return sizes().shard_at_home(operation.block, blueprint().mesh.sharer());
  }

 private:
  [[nodiscard]] const Use& first_use(bool writes) const {
    return *std::find_if(operation.uses.begin(), operation.uses.end(),
                         [writes](const Use& use) { return use.writes == writes; });
  }
  [[nodiscard]] std::uint32_t shard_in(Role role) const {
    const bool weights = role == Role::weights || operation.payload == plan::Payload::weights;
    return weights ? shard_at_home() : shard_number();
  }
};

// The report of a step: all values of the program with BufferRule::report. Losses are in double
// precision.

/// Places of one class of values: `bytes` per micro-batch, one after the other.
struct ReportPart {
  model::ClassId of = model::kNone;
  Bytes offset = 0;
  Bytes bytes = 0;

  [[nodiscard]] Bytes at(std::uint32_t micro) const { return offset + micro * bytes; }
  /// Returns the numbers of `count` micro-batches from `micro` on.
  [[nodiscard]] std::span<const double> in(HostBytes report, std::uint32_t micro,
                                           std::uint32_t count = 1) const {
    return {reinterpret_cast<const double*>(report.data() + at(micro)),
            count * bytes / sizeof(double)};
  }
};

/// Returns the parts in the order of the program: the losses of the head, then those of the routers
/// if the model has any.
inline std::vector<ReportPart> report_parts(const step::Problem& problem) {
  const std::vector<model::ValueClass>& classes = problem.program().classes;
  std::vector<ReportPart> parts;
  for (model::ClassId id = 0; id < classes.size(); ++id) {
    if (classes[id].buffers != model::BufferRule::report) continue;
    const Bytes end = parts.empty() ? 0 : parts.back().at(problem.micro_batches);
    parts.push_back({id, end, classes[id].bytes});
  }
  return parts;
}

}  // namespace ballast::engine

// Row counts: numbers of rows that routers have dispatched to experts, which operations read in
// host memory.

namespace ballast::engine {

/// Returns the bytes of one router's counts for one micro-batch, over all ranks.
Bytes counts_of_micro_batch(const step::Problem& problem);
/// Returns their place in `counts`, a buffer in host memory for all micro-batches.
HostBytes counts_of_micro_batch(const step::Problem& problem, state::Store& store,
                                plan::BufferId counts, std::uint32_t micro);

/// Returns them as the numbers that model::RoutingCounts reads.
std::span<const std::int32_t> routing_of(const CurrentOperation& at, plan::BufferId counts,
                                         std::uint32_t micro);

/// Returns whether the conditions of the operation require work.
bool has_work(const CurrentOperation& at);

/// For the gate, which reads the counts of all routers: adds the rows of each expert and the router
/// losses to the result.
void report_routing(const CurrentOperation& at);

/// Waits for the pass of `at` and searches its results for values that are not finite: activations,
/// their gradients, gradient sums and losses. Copies them to the host in pieces. In fp16 only
/// activations and losses, because gradients overflow while the loss scale adapts. Throws
/// Error(numeric) with the port, the number of such values and the place of the first.
void check_results(const CurrentOperation& at, const model::Pass& pass,
                   const model::PassArguments& arguments);

/// The function that performs operations of one action.
struct ActionHandler {
  plan::Action action;
  void (*run)(const CurrentOperation&);
};

// Handlers in separate files.
void run_pass(const CurrentOperation& at);
void run_exchange(const CurrentOperation& at);
void run_gate(const CurrentOperation& at);
void run_update(const CurrentOperation& at);
void run_update_on_device(const CurrentOperation& at);

/// Returns the arguments that the operation binds to the ports of its pass, cut to the sizes of the
/// operands.
model::PassArguments arguments_of(const CurrentOperation& at, const model::Pass& pass);
/// Returns the statistics of a gradient in host memory.
GradientStats statistics_in(const CurrentOperation& at, plan::BufferId buffer);

}  // namespace ballast::engine
