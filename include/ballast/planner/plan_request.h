#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "ballast/config/config.h"
#include "ballast/core/mesh.h"
#include "ballast/engine/blueprint.h"
#include "ballast/memory/budget.h"
#include "ballast/plan/rates.h"
#include "ballast/plan/simulator.h"

namespace ballast::planner {

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
