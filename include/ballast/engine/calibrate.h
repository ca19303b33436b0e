#pragma once

#include <string>

#include "ballast/config/config.h"
#include "ballast/model/architecture.h"
#include "ballast/schedule/rates.h"

namespace ballast::engine {

/// Measures what this machine does for the model and paths of `config`: kernels of one layer and of
/// the head at a few micro-batch sizes (the config's own among them), update, copies, and reading,
/// writing and both at once on the paths to swap to (aio.paths' own rates are kept). Takes a few
/// seconds and less memory than one layer's states plus 256 MiB; leaves nothing behind. Throws
/// Error like a run would.
schedule::Rates calibrate(const config::Config& config, const model::Architecture& model);

/// Everything that a calibration depends on, as text: processor, cores, device, threads, link,
/// paths, type and shape of the model's layers. Equal keys: the same rates hold.
std::string calibration_key(const config::Config& config, const model::Architecture& model);

}  // namespace ballast::engine
