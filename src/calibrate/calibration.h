#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "ballast/config/config.h"
#include "ballast/core/units.h"
#include "ballast/engine/blueprint.h"
#include "ballast/model/architecture.h"
#include "ballast/model/compute.h"
#include "ballast/plan/rates.h"

#include "src/calibrate/slices.h"

namespace ballast::calibrate {

/// Repeats of a measurement: until `seconds` have passed, between `least` and `most` times.
struct Repeats {
  double seconds = 0.15;
  std::size_t least = 1;
  std::size_t most = 7;
};

/// undisturbed_seconds() of `work`, with a slice for each call after one uncounted call. `prepare`
/// (may be empty) runs before each call, uncounted.
double measured_seconds(const SliceConditions& conditions, const Repeats& repeats,
                        const std::function<void()>& work,
                        const std::function<void()>& prepare = {});

/// One layer of the model with a head, on which the calibration measures.
struct Sample {
  const config::Config& config;
  /// One layer and the head; the vocabulary is cut where the matrix would be too large.
  engine::Blueprint blueprint;
  std::size_t blocks = 0;      ///< of the whole model
  std::uint64_t length = 0;    ///< tokens of a sequence
  Bytes last_level_cache = 0;  ///< 0: unknown
  bool busy = false;           ///< other processes use the CPUs (SliceConditions)
  const std::atomic<bool>* interrupted = nullptr;

  /// Throws Error(interrupted) after a signal.
  void check_interrupt() const;
};

/// Threads of a compute kernel on the host device; 0 if a GPU computes.
int compute_team(const config::Config& config);

/// How most backward passes of the config's steps treat gradients.
model::Accumulation usual_accumulation(const config::Config& config);

Sample make_sample(const config::Config& config, const model::Architecture& model);

/// The config's sequence length, or as much of it as a layer computes in seconds. Operations on
/// longer sequences have nearly the same FLOPs per second.
std::uint64_t measurable_length(const Sample& sample);

/// How many buffers of `bytes` a measurement uses in turn so that they are as cold in the caches as
/// the whole model's: more than the caches hold, but at most one per block of the model.
std::size_t cold_copies(const Sample& sample, Bytes bytes);

/// One try of a measurement.
struct Attempt {
  plan::Rates rates;
  double others_share = 0.0;  ///< see CpuWatch
};

/// A measurement that counts.
struct Measurement {
  plan::Rates rates;
  std::string disturbance;  ///< "" if nothing disturbed it
  double other_work = 0.0;  ///< see Calibration
};

/// Rates of `attempt`, which is repeated once if it is disturbed and `again` returns true. `again`
/// is given the reason and prepares the repetition. The repetition counts, since it corrects for
/// other work.
Measurement measure_part(const std::function<Attempt()>& attempt,
                         const std::function<bool(const std::string& why)>& again);

// Each measures the rates of one part of the machine.
void measure_compute(const Sample& sample, plan::Rates& rates);
void measure_update(const Sample& sample, plan::Rates& rates);
void measure_link(const Sample& sample, plan::Rates& rates);
void measure_swap(const Sample& sample, plan::Rates& rates);

// Parts of a step that run concurrently; `sample` must outlive them.
/// Forward and backward pass of a layer, with micro-batches of the largest size measured.
std::function<void()> layer_passes(const Sample& sample, const plan::Rates& rates);
/// Copy of a layer's weights to the device, over the config's link.
std::function<void()> uploads(const Sample& sample);
/// Read of a part of a layer's states.
std::function<void()> fetches(const Sample& sample);

}  // namespace ballast::calibrate
