#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "ballast/cpu_adam/updater.h"

#include "src/offload/homes.h"
#include "src/offload/layout.h"

namespace ballast::offload {

/// One parameter of a step. The caller owns the arrays. They must stay valid, and must not be used
/// otherwise, until the step has updated the parameter.
struct ParameterUpdate {
  std::size_t parameter = 0;
  void* weights = nullptr;  ///< in the parameter's type
  cpu_adam::Gradient gradient;
  cpu_adam::Hyper hyper;
};

/// The optimizer states of another program's parameters, and their updates on a separate thread.
/// Results do not depend on the place of the states, the size of sub-groups, or the instruction
/// set. Calls must not overlap.
///
/// 16-bit weights have an fp32 master. Each update first compares the weights with those that the
/// master belongs to: weights that the caller has changed become the master (see masters.h).
class OffloadedOptimizer {
 public:
  OffloadedOptimizer(OffloadLayout layout, StatePlace place, int threads);
  /// Waits for a running step.
  ~OffloadedOptimizer();
  OffloadedOptimizer(const OffloadedOptimizer&) = delete;
  OffloadedOptimizer& operator=(const OffloadedOptimizer&) = delete;

  [[nodiscard]] const OffloadLayout& layout() const { return layout_; }
  [[nodiscard]] const cpu_adam::Updater& updater() const { return updater_; }
  [[nodiscard]] const StateHomes& homes() const { return homes_; }

  /// Appends parameters with zero states, and returns the number of the first one. Existing states
  /// keep their places. Nothing changes if it throws; throws like Homes and begin().
  std::size_t add(const std::vector<Parameter>& parameters);

  /// Starts a step and returns; the parameters are updated in ascending order. Waits for the
  /// preceding step. Throws Error(state) for a duplicate parameter. Throws the errors of a failed
  /// step: the states are then lost, and every later call throws the same.
  void begin(std::vector<ParameterUpdate> updates);
  /// Blocks until the running step, if any, has updated the parameter. Throws like begin().
  void wait(std::size_t parameter);
  /// Blocks until no step is running. Throws like begin().
  void finish();

  /// Makes the next update of the parameter take all its weights as the master. Throws like
  /// begin().
  void forget_master(std::size_t parameter);

  /// Calls `work` for each part of the parameter, with its arrays and without a gradient. It
  /// returns whether it has changed the states. `weights`: those of the parameter, or null if
  /// `work` uses neither them nor the master. On NVMe, changes of one sub-group by several visits
  /// are written once. Throws like begin().
  void visit(std::size_t parameter, void* weights,
             const std::function<bool(const ParameterPart&, const PartStates&)>& work);

 private:
  void run();
  void run_step();
  void update_group(std::size_t group);
  void update_part(const PartStates& states, const cpu_adam::Hyper& hyper) const;
  /// Updates parts [first, last) of a sub-group, if the step has updates of them.
  void update_parts(std::size_t group, std::size_t first, std::size_t last, HostBytes states) const;
  void rethrow_failure();

  OffloadLayout layout_;
  cpu_adam::Updater updater_;
  StateHomes homes_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<const ParameterUpdate*> update_of_;  ///< by parameter; null: none in this step
  std::vector<ParameterUpdate> updates_;
  std::size_t updated_ = 0;  ///< parameters below this number are updated
  bool running_ = false;
  bool stopping_ = false;
  std::exception_ptr failure_;
  std::thread thread_;  ///< starts with the first step
};

}  // namespace ballast::offload
