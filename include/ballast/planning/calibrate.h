#pragma once

#include <atomic>
#include <string>

#include "ballast/config/config.h"
#include "ballast/model/architecture.h"
#include "ballast/schedule/rates.h"

namespace ballast::planning {

/// Whether `config` places anything on NVMe or lets the planner do so. Open activations and
/// gradients alone do not count: they are there only if nothing else fits (measured_config()).
bool may_swap(const config::Config& config);

/// Whether `config` names NVMe for anything.
bool must_swap(const config::Config& config);

/// Measured rates of this machine.
struct Calibration {
  schedule::Rates rates;
  /// What disturbed the measurement, also when it was repeated; "" if nothing did. Disturbed rates
  /// are not worth keeping.
  std::string disturbance;
};

/// Measures this machine for the model and swap paths of `config`: kernels of one layer and of the
/// head at a few micro-batch sizes (including the config's own), the optimizer update, host-device
/// copies, and reads, writes and mixed I/O through the swap space, striped by the bandwidths in
/// aio.paths. Takes a few seconds and memory for one layer, its workspace and half a GiB more;
/// leaves no files. Sequences that take too long are measured shorter. Measurements beside other
/// work, or with rates that contradict each other, are repeated up to twice. `interrupted` (may be
/// null) ends it with Error(interrupted). Throws Error like a run. Swap paths that cannot be used
/// cause a warning and rates of 0 if the config names no tier on NVMe, otherwise an Error.
Calibration calibrate(const config::Config& config, const model::Architecture& model,
                      const std::atomic<bool>* interrupted = nullptr);

/// Everything that a calibration depends on, as text: processor, cores, device, threads, link,
/// paths, type and shape of the model's layers. Rates are reusable where the keys are equal.
std::string calibration_key(const config::Config& config, const model::Architecture& model);

}  // namespace ballast::planning
