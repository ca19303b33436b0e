#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "ballast/config/config.h"
#include "ballast/core/places.h"
#include "ballast/engine/blueprint.h"
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

struct PlanRequest {
  config::Config config;
  model::Architecture model;  ///< model of the config
  memory::Budgets budgets;
  plan::Rates rates;
  Mesh mesh;
  /// Returns the memory that kernels need for a micro-batch shape. If empty: the host device's
  /// where compute and update share cores, otherwise CUDA's; without rates, those of the config's
  /// device.
  std::function<model::KernelSizes(model::MicroBatchShape)> kernels;
  std::shared_ptr<KnownKernels> known_kernels = std::make_shared<KnownKernels>();
  /// Devices that the rank may use: for pipeline.stages "auto", and for advice.
  std::uint32_t devices = 1;
  /// Limit on the number of operations that the search builds and simulates.
  std::size_t work_limit = 2'000'000;
  /// Number of threads that search; 0: one per usable CPU, at most 16. Changes no decision.
  std::size_t threads = 0;
  /// Stops the search with Error(interrupted); may be null.
  const std::atomic<bool>* interrupted = nullptr;
};

struct Decision {
  config::Config config;        ///< the given config with every "auto" decided
  engine::Blueprint blueprint;  ///< the simulated blueprint; `config` reproduces it
  plan::Prediction prediction;
  std::size_t simulated = 0;  ///< number of simulated plans
};

}  // namespace ballast::planner
