#pragma once

#include <string>

#include "ballast/config/config.h"
#include "ballast/model/architecture.h"
#include "ballast/schedule/rates.h"

namespace ballast::planning {

/// Whether anything of a run of `config` may lie on NVMe: named so, or left to the planner.
bool may_swap(const config::Config& config);

/// Measures what this machine does for the model and paths of `config`: kernels of one layer and of
/// the head at a few micro-batch sizes (the config's own among them), update, copies, and reading,
/// writing and both at once on the paths to swap to, as the swap space does it (what aio.paths says
/// of their bandwidth decides where the bytes go, as in a run). Takes a few seconds, and memory for
/// one layer with its workspace and for half a GiB more; leaves nothing behind. Throws Error like a
/// run would; but paths that cannot be swapped to are no error, only a log line and rates of 0,
/// when no tier is named that needs them.
schedule::Rates calibrate(const config::Config& config, const model::Architecture& model);

/// Everything that a calibration depends on, as text: processor, cores, device, threads, link,
/// paths, type and shape of the model's layers. Equal keys: the same rates hold.
std::string calibration_key(const config::Config& config, const model::Architecture& model);

}  // namespace ballast::planning
