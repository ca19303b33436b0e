#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "ballast/core/units.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/run_inputs.h"
#include "ballast/model/architecture.h"
#include "ballast/model/compute.h"
#include "ballast/plan/rates.h"

namespace ballast::calibrate {

/// Times of one slice of a measurement, in seconds.
struct Slice {
  double wall = 0.0;
  double cpu = 0.0;     ///< CPU time of all threads of this process
  double waited = 0.0;  ///< time runnable without a CPU, summed over the threads of this process
};

/// Properties of the measured work, and of the machine while it ran.
struct SliceConditions {
  /// CPUs that the work keeps busy. 0: it runs elsewhere, for example on a GPU or a drive.
  double cpus = 1.0;
  /// True if other processes use the CPUs, so that wall times mean little.
  bool busy = false;
};

/// An estimate from repeated slices of the same work.
struct SliceEstimate {
  double seconds = 0.0;  ///< time of a slice on an otherwise idle machine, at least 1e-9
  /// Time by which the median of the slices exceeds `seconds`, relative to `seconds`. A few percent
  /// on an idle machine.
  double spread = 0.0;
};

/// Estimates the seconds that slices of the same work take on an otherwise idle machine.
///
/// Other work can only make a slice longer, so the fastest one is closest to the truth. Slices of
/// up to 1.1 times its wall time differ by the jitter of an idle machine, which a step has, too:
/// the result is their mean. Slices whose threads waited for a CPU are excluded if enough others
/// remain. Times of drives differ without other work, so for work elsewhere the result is the mean
/// of the slices up to twice the median.
///
/// On a busy machine almost no slice is undisturbed, because a team of threads is only as fast as
/// the thread that waits longest for its CPU. The CPU time of the same work hardly depends on other
/// processes, which can only lengthen it through caches and memory. The result is the minimum CPU
/// time per CPU of the work; for work on one CPU, at least the wall time without waits. It is up to
/// 10% too short for kernels with serial parts. For work elsewhere it is the lower quartile of the
/// wall times, which excludes late wake-ups.
SliceEstimate undisturbed_time(std::span<const Slice> slices, const SliceConditions& conditions);

/// Measures slices of this process's work. Linux reports in /proc/self/task/TID/schedstat how long
/// a thread has waited for a CPU; without this file the waits are 0.
class SliceClock {
 public:
  void start();
  /// Returns the times since start().
  Slice stop();

 private:
  /// Seconds that each thread has waited for a CPU since its start.
  using Waits = std::map<std::string, double>;
  static Waits read_waits();

  std::chrono::steady_clock::time_point start_;
  double cpu_ = 0.0;
  Waits waits_;
};

/// Returns a hash of the sources of all kernels (models, optimizer updates, devices and file I/O).
/// Rates measured with other sources are not used.
std::string_view kernel_hash() noexcept;

/// Number of repetitions of a measurement: until `seconds` have passed, between `least` and `most`
/// times.
struct Repeats {
  double seconds = 0.15;
  std::size_t least = 1;
  std::size_t most = 7;
};

/// Returns undisturbed_time() of `work`, with one slice per call after one uncounted call.
/// `prepare` (may be empty) runs before each call, uncounted.
SliceEstimate measured_time(const SliceConditions& conditions, const Repeats& repeats,
                            const std::function<void()>& work,
                            const std::function<void()>& prepare = {});

/// The layers of the model and a head, on which the calibration measures.
struct Sample {
  const engine::RunInputs& run;
  /// Layers without experts, as wide as a tile if layers are cut, and the head. The vocabulary is
  /// reduced if its matrix would be too large. All tensors are trained.
  engine::Blueprint blueprint;
  /// This model with the run's adapters and frozen tensors. Layers that
  /// stand for experts or tiles are trained in full.
  model::Architecture computed;
  std::size_t blocks = 0;      ///< number of blocks of the whole model
  std::uint64_t length = 0;    ///< tokens per sequence
  Bytes last_level_cache = 0;  ///< 0: unknown
  bool busy = false;           ///< whether other processes use the CPUs (SliceConditions)
  /// The largest spread of a measurement so far. Copies of a sample share it.
  std::shared_ptr<double> spread = std::make_shared<double>(0.0);
  const std::atomic<bool>* interrupted = nullptr;

  /// Throws Error(interrupted) after a signal.
  void check_interrupt() const;
  /// Returns the seconds of an estimate and records its spread.
  double record(const SliceEstimate& estimate) const;
  /// Returns the seconds of measured_time() for work that keeps `cpus` CPUs busy, and records its
  /// spread.
  double measure(double cpus, const Repeats& repeats, const std::function<void()>& work,
                 const std::function<void()>& prepare = {}) const;
};

/// Threads of a compute kernel on the host device; 0 if a GPU computes.
int compute_team(const engine::DeviceRequest& devices);

/// Returns whether a rank has several devices, or may get them by "auto".
bool has_several_devices(const engine::DeviceRequest& devices);

/// Treatment of gradients in most backward passes of a run's steps.
model::Accumulation usual_accumulation(const engine::BatchRule& batch);

/// `run` must outlive the sample.
Sample make_sample(const engine::RunInputs& run);

/// The run's sequence length, or the part of it that a layer computes in seconds. Operations on
/// longer sequences have nearly the same FLOP/s.
std::uint64_t measurable_length(const Sample& sample);

/// Number of buffers of `bytes` that a measurement uses in turn so that they are as cold in the
/// caches as the whole model's: more than the caches hold, but at most one per block of the model.
std::size_t cold_copies(const Sample& sample, Bytes bytes);

/// One attempt at a measurement.
struct Attempt {
  plan::Rates rates;
  double others_share = 0.0;  ///< see CpuWatch
  double spread = 0.0;        ///< the largest of its measurements, see SliceEstimate
};

/// A measurement that counts.
struct Measurement {
  plan::Rates rates;
  std::string disturbance;  ///< "" if nothing disturbed it
  double other_work = 0.0;  ///< see Calibration
  double spread = 0.0;      ///< see Calibration
};

/// Returns the rates of `attempt`. If it is disturbed and `again` returns true, repeats it once and
/// returns the repetition's rates, which are corrected for other work. `again` receives the reason
/// and prepares the repetition.
Measurement measure_part(const std::function<Attempt()>& attempt,
                         const std::function<bool(const std::string& why)>& again);

/// Rates of the parts of a layer that have their own, as in plan::Rates; 0: not measured.
struct PartRates {
  std::array<plan::AttentionRate, kAttentionClassCount> attention{};
  double adapters = 0.0;
};
/// FLOPs of attention by class.
using AttentionFlops = std::array<double, kAttentionClassCount>;
/// Work of a layer, averaged over the passes of a step.
struct LayerWork {
  double forward = 0.0;                    ///< FLOPs
  double backward = 0.0;                   ///< FLOPs, with recomputation
  AttentionFlops attention{};              ///< in the forward pass
  AttentionFlops attention_of_backward{};  ///< in the forward pass that a backward pass recomputes
  double adapters = 0.0;                   ///< bytes, see model::PassCost::adapter_traffic
  double adapters_of_backward = 0.0;       ///< bytes, with recomputation
};
/// Returns the FLOPs that a pass counts for attention whose forward pass has `flops`. A backward
/// pass counts twice that, and recomputes the forward pass.
double counted_flops(double flops, model::CostCurve curve);
/// Returns the seconds of that attention in the pass. `rate` is not zero.
double seconds_of_attention(AttentionClass of, const plan::AttentionRate& rate, double flops,
                            model::CostCurve curve);
/// Measures the parts on the layers of `sample`, in micro-batches of `sequences` sequences. Parts
/// that are too small to be measured, and those of layers without a backward pass, have no rates.
PartRates measure_parts(const Sample& sample, std::uint64_t sequences);
/// Gives the measured parts their own rates and takes them out of the curves of `rates`, which were
/// measured on whole layers. `work_of` returns the work of a layer for a number of tokens. Does
/// nothing if that would leave too little time for the rest.
void separate_parts(plan::Rates& rates, const PartRates& parts,
                    const std::function<LayerWork(double tokens)>& work_of);

// Each function measures the rates of one part of the machine.
void measure_compute(const Sample& sample, plan::Rates& rates);
void measure_update(const Sample& sample, plan::Rates& rates);
void measure_link(const Sample& sample, plan::Rates& rates);
void measure_swap(const Sample& sample, plan::Rates& rates);

// Parts of a step that run concurrently; `sample` must outlive them.
/// Forward and backward pass of a layer, with micro-batches of the largest measured size.
std::function<void()> layer_passes(const Sample& sample, const plan::Rates& rates);
/// Copy of a layer's weights to the device, over the run's link.
std::function<void()> uploads(const Sample& sample);
/// Update of a layer on the host.
std::function<void()> updates(const Sample& sample);
/// Read and write of a part of a layer's states, one after the other.
std::function<void()> transfers(const Sample& sample);

/// Speeds of two kinds of work that overlap, each relative to running alone; 1 means no slowdown.
struct OverlapSpeeds {
  double work = 1.0;
  double bursts = 1.0;
};
/// Calls `work` without pauses, and `bursts` on another thread with pauses as long as its calls.
/// The speed of `work` is computed from its additional time per second of bursts. Alternates
/// measurements alone and together, because the machine's speed may change. Rethrows exceptions.
OverlapSpeeds overlap_speeds(const std::function<void()>& work,
                             const std::function<void()>& bursts);

}  // namespace ballast::calibrate
