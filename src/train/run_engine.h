#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "ballast/comm/agreement.h"
#include "ballast/comm/communicator.h"
#include "ballast/core/error.h"
#include "ballast/data/loader.h"
#include "ballast/engine/engine.h"

namespace ballast::train {

/// A failure of the engine in a step: an error of the swap space, or damaged data. The engine
/// cannot be used afterwards.
class StepFailure : public Error {
 public:
  using Error::Error;
};

/// Calls `work`, which uses the engine. Converts its Error(io) and Error(state) to a StepFailure; a
/// JointError passes unchanged.
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

/// Describes the devices of a rank, which are of one kind: "host device", "2 devices: host device".
std::string describe_devices(engine::Engine& engine);

/// The engine of a run, which is replaced when the run goes back to a checkpoint.
class RestartableEngine {
 public:
  /// See engine::Engine.
  RestartableEngine(engine::Blueprint blueprint, engine::EngineOptions options,
                    const std::atomic<bool>* interrupted, comm::Ranks* ranks);

  [[nodiscard]] engine::Engine& operator*() { return *engine_; }
  [[nodiscard]] engine::Engine* operator->() { return &*engine_; }
  [[nodiscard]] const engine::Engine* operator->() const { return &*engine_; }
  [[nodiscard]] const engine::Blueprint& blueprint() const { return blueprint_; }
  /// Returns false after a failed replace().
  [[nodiscard]] bool exists() const { return engine_.has_value(); }

  /// Frees the engine and makes a new one, which must be started or resumed. Collective with
  /// several ranks; every rank first completes its submitted operations. Throws like the
  /// constructor and Engine::drain(). After a failure, only another replace() is allowed.
  void replace();

  /// Prepares the end of the engine after an error. Does nothing with one rank. `jointly`: all
  /// ranks have the error, so they complete their submitted operations. Otherwise only this rank
  /// has failed, and it no longer waits for other ranks.
  void leave(bool jointly);

  /// Returns the peak of matrix products in FLOP/s: that of the first device, measured for
  /// `seconds`, times the number of different GPUs. Host devices share the cores.
  [[nodiscard]] double measure_gemm_peak(double seconds);

  /// Describes what computes the updates: an instruction set, or "on the GPU".
  [[nodiscard]] std::string describe_update();

  /// Returns sums over all engines so far, except for `allocated` and `fill_seconds`.
  [[nodiscard]] engine::EngineTotals totals() const;

 private:
  engine::Blueprint blueprint_;
  engine::EngineOptions options_;
  const std::atomic<bool>* interrupted_;
  comm::Ranks* ranks_;
  engine::EngineTotals before_;  ///< totals of replaced engines
  std::optional<engine::Engine> engine_;
};

engine::TokenBatch of_engine(const data::Batch& batch);

/// Called with the number of finished micro-batches of all ranks, and the total.
using EvaluationProgress = std::function<void(std::uint64_t done, std::uint64_t total)>;

/// Returns the mean loss over the first `requested` micro-batches of `batches`, which the
/// engine's ranks share (see EvaluationShare). Empty if there are none, or if none of their targets
/// counts. Throws like engine::Engine::evaluate() and SequenceSource::read().
std::optional<engine::Evaluation> evaluate(engine::Engine& engine,
                                           const data::EvaluationBatches& batches,
                                           std::uint64_t requested,
                                           const EvaluationProgress& progress = {});

}  // namespace ballast::train
