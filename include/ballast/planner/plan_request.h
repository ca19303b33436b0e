#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ballast/core/places.h"
#include "ballast/engine/run_inputs.h"
#include "ballast/memory/machine.h"
#include "ballast/plan/rates.h"
#include "ballast/plan/simulator.h"

namespace ballast::planner {

/// The memory of kernels that a request, and requests that differ from it in their placement, rates
/// or budgets, have asked for. It takes as long as a simulation of a small model.
class KnownKernels {
 public:
  /// Returns what `find` has returned for an equal `question`.
  model::KernelSizes of(const std::string& question,
                        const std::function<model::KernelSizes()>& find) {
    const std::scoped_lock lock(mutex_);
    const auto known = sizes_.find(question);
    return known != sizes_.end() ? known->second : sizes_.emplace(question, find()).first->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, model::KernelSizes> sizes_;
};

/// Settings of a run's config that are changed together: "KEY=VALUE", as for `--set`.
using Overrides = std::vector<std::string>;

struct PlanRequest {
  engine::RunInputs run;
  memory::Budgets budgets;
  plan::Rates rates;
  Mesh mesh;
  /// Returns the request for the run with changed settings, of which `run` and `change` are used.
  /// Throws Error(config) if they break a rule of configs. If empty, no settings are changed: then
  /// refusals name only budgets.
  std::function<PlanRequest(const Overrides&)> change;
  /// Returns the memory that kernels need for a micro-batch shape. If empty: the host device's
  /// where compute and update share cores, otherwise CUDA's; without rates, those of the run's
  /// device.
  std::function<model::KernelSizes(model::MicroBatchShape)> kernels;
  std::shared_ptr<KnownKernels> known_kernels = std::make_shared<KnownKernels>();
  /// Devices that the rank may use, if their number is open, and for advice.
  std::uint32_t devices = 1;
  /// Limit on the number of operations that the search builds and simulates.
  std::size_t work_limit = 2'000'000;
  /// Number of threads that search; 0: one per usable CPU, at most 16. Changes no decision.
  std::size_t threads = 0;
  /// Stops the search with Error(interrupted); may be null.
  const std::atomic<bool>* interrupted = nullptr;
};

struct Decision {
  engine::Blueprint blueprint;  ///< with every choice that the run leaves open
  plan::Prediction prediction;
  std::size_t simulated = 0;  ///< number of simulated plans
};

}  // namespace ballast::planner
