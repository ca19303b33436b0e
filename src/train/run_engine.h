#pragma once

#include <atomic>
#include <optional>
#include <string>

#include "ballast/comm/collective_try.h"
#include "ballast/comm/communicator.h"
#include "ballast/core/error.h"
#include "ballast/engine/engine.h"

namespace ballast::train {

/// A failure of the engine in a step: an error of the swap space, or data that it found damaged.
/// The engine then runs nothing any more.
class StepFailure : public Error {
 public:
  using Error::Error;
};

/// Calls `work`, which uses the engine. Its Error(io) and Error(state) become a StepFailure; a
/// JointError stays what it is.
template <class Work>
auto as_step_failure(Work work) {
  try {
    return work();
  } catch (const comm::JointError&) {
    throw;
  } catch (const Error& error) {
    const ErrorCategory category = error.category();
    if (category == ErrorCategory::io || category == ErrorCategory::state) {
      throw StepFailure(category, error.what());
    }
    throw;
  }
}

/// The engine of a run, in whose place a run that goes back to a checkpoint puts a new one.
class RestartableEngine {
 public:
  /// See engine::Engine.
  RestartableEngine(engine::Blueprint blueprint, engine::EngineOptions options,
                    const std::atomic<bool>* interrupted, comm::Ranks* ranks);

  [[nodiscard]] engine::Engine& operator*() { return *engine_; }
  [[nodiscard]] engine::Engine* operator->() { return &*engine_; }
  [[nodiscard]] const engine::Engine* operator->() const { return &*engine_; }
  [[nodiscard]] const engine::Blueprint& blueprint() const { return blueprint_; }
  /// False after a failed replace().
  [[nodiscard]] bool exists() const { return engine_.has_value(); }

  /// Frees what the engine holds and makes another one, which is to be started or resumed. With
  /// several ranks collective; every rank then runs its submitted operations to their end first.
  /// Throws like the constructor and Engine::drain(); another call may then succeed, and nothing
  /// else is allowed.
  void replace();

  /// Prepares the end of the engine after an error; nothing with one rank. `jointly`: all ranks
  /// have the error, so they run their submitted operations to their end. Otherwise this rank has
  /// failed alone and waits for no other rank from now on.
  void leave(bool jointly);

  /// What computes the updates: an instruction set, or "on the GPU".
  [[nodiscard]] std::string describe_update();

  /// Sums over all engines so far, except for `allocated` and `fill_seconds`.
  [[nodiscard]] engine::EngineTotals totals() const;

 private:
  engine::Blueprint blueprint_;
  engine::EngineOptions options_;
  const std::atomic<bool>* interrupted_;
  comm::Ranks* ranks_;
  engine::EngineTotals before_;  ///< of the engines that were replaced
  std::optional<engine::Engine> engine_;
};

}  // namespace ballast::train
