#pragma once

#include <cstddef>
#include <functional>

#include "ballast/config/config.h"
#include "ballast/core/units.h"
#include "ballast/engine/blueprint.h"
#include "ballast/model/architecture.h"
#include "ballast/schedule/rates.h"

namespace ballast::planning {

/// How often a piece of work is repeated: until this much time has been spent on it.
struct Repeats {
  double seconds = 0.15;
  std::size_t least = 1;
  std::size_t most = 7;
};

/// Mean seconds of `work`, calls that take more than twice the median left out, after one call that
/// is not counted; `prepare`, if any, comes before each and is not counted either.
double mean_seconds(const Repeats& repeats, const std::function<void()>& work,
                    const std::function<void()>& prepare = {});

/// What a part of the calibration measures: one layer of the model, alone with a head of its own,
/// in memory of its own.
struct Sample {
  const config::Config& config;
  /// One layer and the head; the vocabulary is cut where the matrix would be too large.
  engine::Blueprint blueprint;
  std::size_t blocks = 0;      ///< of the whole model
  Bytes last_level_cache = 0;  ///< 0: unknown
};

Sample make_sample(const config::Config& config, const model::Architecture& model);

/// How many buffers of `bytes` a measurement takes in turn so that they are as cold as those of the
/// whole model: more than the caches hold, but no more than the model has blocks.
std::size_t cold_copies(const Sample& sample, Bytes bytes);

/// Kernels: curves, device memory, launch.
void measure_compute(const Sample& sample, schedule::Rates& rates);
/// The optimizer on host memory.
void measure_update(const Sample& sample, schedule::Rates& rates);
/// Copies between host and device.
void measure_link(const Sample& sample, schedule::Rates& rates);
/// NVMe as the swap space sees it.
void measure_swap(const Sample& sample, schedule::Rates& rates);

// Parts of a step, to run beside each other; `sample` must outlive them.
/// Forward and backward pass of a layer, with micro-batches of the largest size measured.
std::function<void()> layer_passes(const Sample& sample, const schedule::Rates& rates);
/// Copy of a layer's weights to the device, over the config's link.
std::function<void()> uploads(const Sample& sample);
/// Read of a part of a layer's states.
std::function<void()> fetches(const Sample& sample);

}  // namespace ballast::planning
