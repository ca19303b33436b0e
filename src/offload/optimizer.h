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

/// One parameter of a step. The caller owns the arrays; they must stay valid, and must not be used
/// otherwise, until the step has updated the parameter.
struct ParameterUpdate {
  std::size_t parameter = 0;
  void* weights = nullptr;  ///< in the parameter's type
  cpu_adam::Gradient gradient;
  cpu_adam::Hyper hyper;
};

/// The optimizer states of parameters that belong to another program, and their updates on a thread
/// of its own. Results do not depend on where the states are, on the size of a sub-group or on the
/// instruction set. Calls must not overlap.
///
/// 16-bit weights have an fp32 master. It equals the weights until their first update, and again
/// after forget_master(). An fp16 weight that differs from its rounded master was changed by
/// somebody else and replaces the master.
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

  /// Appends parameters, whose states are zero, and returns the number of the first one. Existing
  /// states stay where they are. Nothing changes if it throws; throws like Homes and begin().
  std::size_t add(const std::vector<Parameter>& parameters);

  /// Starts a step and returns; the parameters are updated in ascending order. Waits for the step
  /// before. Throws Error(state) for a parameter that is named twice, and the errors of a step that
  /// failed: the states are then lost, and every later call throws the same.
  void begin(std::vector<ParameterUpdate> updates);
  /// Blocks until the running step, if any, has updated the parameter. Throws like begin().
  void wait(std::size_t parameter);
  /// Blocks until no step is running. Throws like begin().
  void finish();

  /// Takes the weights of the parameter as its master at its next update, for weights that somebody
  /// else has changed.
  void forget_master(std::size_t parameter);

  /// Calls `work` for each part of the parameter, with its arrays and without a gradient. It
  /// returns whether it has changed the states. `weights`: those of the parameter, or null if
  /// `work` uses the moments alone. Throws like begin().
  void visit(std::size_t parameter, void* weights,
             const std::function<bool(const ParameterPart&, const cpu_adam::Shard&)>& work);

 private:
  void run();
  void run_step();
  void update_group(std::size_t group);
  /// Makes the master one of the weights. Returns whether the states have changed.
  bool require_master(const cpu_adam::Shard& shard, char& known) const;
  bool follow_weights(const cpu_adam::Weights& weights, Elems size) const;
  void know_parts();
  void rethrow_failure();

  OffloadLayout layout_;
  cpu_adam::Updater updater_;
  StateHomes homes_;
  std::vector<std::vector<char>> knows_master_;  ///< by sub-group and part

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<const ParameterUpdate*> update_of_;  ///< by parameter; null: none in this step
  std::vector<ParameterUpdate> updates_;
  std::size_t updated_ = 0;  ///< parameters before this one are updated
  bool running_ = false;
  bool stopping_ = false;
  std::exception_ptr failure_;
  std::thread thread_;  ///< begins with the first step
};

}  // namespace ballast::offload
