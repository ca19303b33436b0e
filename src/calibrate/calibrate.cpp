#include "ballast/calibrate/calibrate.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <fstream>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "ballast/core/error.h"
#include "ballast/core/machine.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/device/streams.h"
#include "ballast/memory/machine.h"

#include "src/calibrate/calibration.h"

namespace ballast::calibrate {
namespace {

/// Maximum size of the sample's output matrix and its gradient.
constexpr Bytes kMatrixBytes = 224 * kMiB;
/// Maximum size of the buffers that are used in turn to stay out of caches.
constexpr Bytes kMaxCold = 256 * kMiB;
/// Assumed cache size if it is unknown.
constexpr Bytes kSomeCache = 64 * kMiB;

/// Returns a model as wide as a tile of `whole`. A family that derives the width of its heads from
/// the width of the model (GPT-NeoX) keeps all heads.
model::ModelConfig tile_sample(const model::ModelConfig& whole) {
  model::ModelConfig tile = model::config_of_tile(whole);
  try {
    static_cast<void>(model::build_architecture(tile));
  } catch (const Error& error) {
    if (error.category() != ErrorCategory::config) throw;
    tile.num_heads = whole.num_heads;
    tile.num_kv_heads = whole.num_kv_heads;
  }
  return tile;
}

/// Returns a model with the layers of `model`, without experts and as wide as a tile if layers are
/// cut, and a head, whose rate hardly depends on the size of a large vocabulary.
model::ModelConfig sample_config(const model::Architecture& model, DType type) {
  model::ModelConfig config = tile_sample(model::without_experts(model.config));
  config.vocabulary_tiles = 1;
  const Bytes row = config.hidden_size * (size_of(type) + size_of(DType::f32));
  config.vocab_size = std::clamp<std::uint64_t>(kMatrixBytes / row, 1, config.vocab_size);
  return config;
}

/// Returns `run` for one micro-batch of one sequence on one rank, with the sample's layers. All
/// tensors are trained.
engine::RunInputs sample_run(const engine::RunInputs& run) {
  engine::RunInputs sample = run;
  sample.model = model::build_architecture(sample_config(run.model, run.type));
  sample.batch.shape = {1, run.batch.shape.length};
  sample.batch.accumulation = 1;
  sample.batch.packed = run.batch.packed && !run.batch.pairs;
  sample.batch.pairs = false;
  return sample;
}

/// Returns Sample::computed for `layers`, the model of sample_run().
model::Architecture computed_model(const engine::RunInputs& run,
                                   const model::Architecture& layers) {
  const bool stands_for_others = layers.config.family != run.model.config.family ||
                                 layers.config.layer_tiles != run.model.config.layer_tiles;
  return stands_for_others ? layers
                           : run.trained_like(layers.config, {.experts = run.model.split.experts});
}

/// Describes the layers that are measured: everything that their kinds of passes depend on.
std::string describe_layers(const model::Architecture& model) {
  std::map<std::string, int> counts;
  for (const model::BlockSpec& block : model.blocks) {
    if (block.kind != model::BlockKind::layer) continue;
    ++counts[fmt::format("{} of {} frozen, attention {} window {} recurrence {}, norms {}",
                         block.frozen_elements, block.elements, block.attention_width,
                         block.attention_window, block.recurrent_products, block.norm_elements)];
  }
  std::string text;
  for (const auto& [layer, count] : counts) text += fmt::format("{} x {}; ", count, layer);
  const bool drops = model.adapters && model.adapters->dropout > 0.0;
  return text + (drops ? "dropout; " : "");
}

/// Measures the swap paths. Unusable ones are an error only if the run places anything on NVMe.
void try_swap(const Sample& sample, plan::Rates& rates) {
  try {
    measure_swap(sample, rates);
  } catch (const Error& error) {
    if (sample.run.constraints.must_swap() || error.category() != ErrorCategory::io) throw;
    log(LogLevel::warning,
        fmt::format("rates: the planner will not use NVMe, because it could not be measured: {}",
                    error.what()));
  }
}

/// Describes the file system of a directory that may not exist yet. All run directories on it have
/// the same rates.
std::string describe_file_system(std::filesystem::path directory) {
  struct stat found = {};
  while (stat(directory.c_str(), &found) != 0 && directory.has_relative_path()) {
    directory = directory.parent_path();
  }
  return fmt::format("file system {}:{}", major(found.st_dev), minor(found.st_dev));
}

std::string describe_paths(const engine::RunInputs& run) {
  if (!run.constraints.may_swap()) return "none";
  const state::SwapOptions& options = run.swap;
  std::string text;
  for (const state::SwapPath& path : options.paths) {
    const std::string place =
        path.key.empty() ? describe_file_system(path.directory) : path.directory.string();
    text +=
        fmt::format("{} {} block {} depth {} flight {} poll {} {} gbps {} {}; ", place,
                    path.io.backend, path.io.block_bytes, path.io.depth, path.io.in_flight_bytes,
                    path.io.sqpoll, path.io.iopoll, path.read_gbps, path.write_gbps);
  }
  return text +
         (options.access == aio::File::Access::buffered ? "through the page cache" : "direct");
}

/// Describes the device and, for a GPU, the version of its driver.
std::string describe_device(const device::DeviceOptions& options) {
  const std::string gpu = device::gpu_name(options);
  std::string driver;
  if (!gpu.empty()) std::getline(std::ifstream("/sys/module/nvidia/version"), driver);
  return options.kind + gpu + (driver.empty() ? "" : " driver " + driver);
}

/// One calibration: measures the unknown parts, one after the other.
class Calibrating {
 public:
  Calibrating(const engine::RunInputs& run, const std::atomic<bool>* interrupted,
              const CalibrationStart& start)
      : sample_(make_sample(run)) {
    sample_.interrupted = interrupted;
    result_.rates = start.known;
    result_.rates.name = "this machine";
    if (start.busy) sample_.busy = true;
  }

  Calibration run() {
    // First, because an unusable path ends the calibration.
    if (sample_.run.constraints.may_swap() && !has_part(result_.rates, CalibrationPart::swap))
      swap();
    sample_.check_interrupt();
    sample_.length = has_part(result_.rates, CalibrationPart::compute) ? sample_.length
                                                                       : measurable_length(sample_);
    measure(CalibrationPart::compute, measure_compute);
    measure(CalibrationPart::update, measure_update);
    measure(CalibrationPart::link, measure_link);
    overlaps();
    for (const CalibrationPart part : kParts) {
      const auto index = static_cast<std::size_t>(part);
      result_.rates.other_work = std::max(result_.rates.other_work, result_.other_work[index]);
      result_.rates.spread = std::max(result_.rates.spread, result_.spread[index]);
    }
    return std::move(result_);
  }

 private:
  /// Not repeated, because the kernel's threads count as other work while the disk works.
  void swap() {
    const CpuWatch watch;
    *sample_.spread = 0.0;
    try_swap(sample_, result_.rates);
    result_.spread[static_cast<std::size_t>(CalibrationPart::swap)] = *sample_.spread;
    if (!sample_.busy) return;
    result_.other_work[static_cast<std::size_t>(CalibrationPart::swap)] = watch.others_share();
  }

  template <class Measure>
  void measure(CalibrationPart part, Measure work) {
    if (has_part(result_.rates, part)) return;
    const auto attempt = [&] {
      const CpuWatch watch;
      Attempt made = {.rates = result_.rates};
      *sample_.spread = 0.0;
      work(sample_, made.rates);
      sample_.check_interrupt();
      made.others_share = watch.others_share();
      made.spread = *sample_.spread;
      return made;
    };
    const auto again = [&](const std::string& why) {
      if (sample_.busy) return false;
      log(LogLevel::info, fmt::format("rates: {}; measuring again with corrections for it", why));
      sample_.busy = true;
      return true;
    };
    Measurement made = measure_part(attempt, again);
    result_.rates = std::move(made.rates);
    result_.other_work[static_cast<std::size_t>(part)] = made.other_work;
    result_.spread[static_cast<std::size_t>(part)] = made.spread;
    if (result_.disturbance.empty()) result_.disturbance = std::move(made.disturbance);
  }

  /// Measures how copies and transfers slow other work down, and how it slows transfers. The
  /// measured times include waiting for cores, which other programs change, so a disturbed result
  /// is discarded.
  void overlaps() {
    plan::Rates& rates = result_.rates;
    if (rates.shared_cores == 0 || sample_.busy) return;
    const auto measure = [&](const std::function<void()>& work, const std::function<void()>& bursts,
                             double& work_speed, double* burst_speed) {
      const CpuWatch watch;
      const OverlapSpeeds speeds = overlap_speeds(work, bursts);
      sample_.check_interrupt();
      if (watch.others_share() > kMuchOtherWork) return;
      work_speed = speeds.work;
      if (burst_speed != nullptr) *burst_speed = speeds.bursts;
    };
    if (rates.compute_beside_copy <= 0.0) {
      measure(layer_passes(sample_, rates), uploads(sample_), rates.compute_beside_copy, nullptr);
    }
    if (rates.read_per_second <= 0.0) return;
    if (rates.io_beside_compute <= 0.0) {
      measure(layer_passes(sample_, rates), transfers(sample_), rates.compute_beside_io,
              &rates.io_beside_compute);
    }
    if (rates.io_beside_update <= 0.0) {
      measure(updates(sample_), transfers(sample_), rates.update_beside_io,
              &rates.io_beside_update);
    }
  }

  Sample sample_;
  Calibration result_;
};

}  // namespace

SliceEstimate measured_time(const SliceConditions& conditions, const Repeats& repeats,
                            const std::function<void()>& work,
                            const std::function<void()>& prepare) {
  work();
  std::vector<Slice> slices;
  SliceClock clock;
  double total = 0.0;
  // CPU times differ little, and on a busy machine each slice takes several times as long.
  constexpr std::size_t kWhenBusy = 5;
  const bool by_cpu_time = conditions.busy && conditions.cpus > 0.0;
  const std::size_t least = by_cpu_time ? std::min(repeats.least, kWhenBusy) : repeats.least;
  const std::size_t most = by_cpu_time ? std::min(repeats.most, kWhenBusy) : repeats.most;
  while (slices.size() < least || (total < repeats.seconds && slices.size() < most)) {
    if (prepare) prepare();
    clock.start();
    work();
    slices.push_back(clock.stop());
    total += slices.back().wall;
  }
  return undisturbed_time(slices, conditions);
}

Sample make_sample(const engine::RunInputs& run) {
  constexpr Bytes kNoLimit = std::numeric_limits<Bytes>::max();
  const engine::RunInputs sample = sample_run(run);
  engine::Blueprint blueprint =
      engine::outline(sample, {.device = kNoLimit, .host = kNoLimit}, {}, {});
  const step::BlockPlacement on_host = {Tier::host, Tier::host, Tier::device};
  engine::place(blueprint, {std::vector(blueprint.model.blocks.size(), on_host)});
  return {.run = run,
          .blueprint = std::move(blueprint),
          .computed = computed_model(run, sample.model),
          .blocks = run.model.blocks.size(),
          .length = sample.batch.shape.length,
          .last_level_cache = memory::read_topology().last_level_cache};
}

std::size_t cold_copies(const Sample& sample, Bytes bytes) {
  const Bytes cache = sample.last_level_cache > 0 ? sample.last_level_cache : kSomeCache;
  const Bytes cold = std::min(8 * cache, kMaxCold);
  return std::clamp<std::size_t>((cold + bytes - 1) / bytes, 1, sample.blocks);
}

void Sample::check_interrupt() const {
  if (interrupted != nullptr && *interrupted) {
    throw Error(ErrorCategory::interrupted, "interrupted while measuring this machine");
  }
}

double Sample::record(const SliceEstimate& estimate) const {
  *spread = std::max(*spread, estimate.spread);
  return estimate.seconds;
}

double Sample::measure(double cpus, const Repeats& repeats, const std::function<void()>& work,
                       const std::function<void()>& prepare) const {
  return record(measured_time({cpus, busy}, repeats, work, prepare));
}

Calibration calibrate(const engine::RunInputs& run, const std::atomic<bool>* interrupted,
                      const CalibrationStart& start) {
  return Calibrating(run, interrupted, start).run();
}

model::Accumulation usual_accumulation(const engine::BatchRule& batch) {
  const bool several = batch.automatic || batch.accumulation > 1;
  return several ? model::Accumulation::later : model::Accumulation::first;
}

std::string_view to_string(CalibrationPart part) noexcept {
  constexpr std::array<std::string_view, kParts.size()> kNames = {"compute", "update", "link",
                                                                  "swap"};
  return kNames[static_cast<std::size_t>(part)];
}

bool has_part(const plan::Rates& rates, CalibrationPart part) {
  switch (part) {
    case CalibrationPart::compute:
      return !rates.forward.empty();
    case CalibrationPart::update:
      return rates.update_per_second > 0.0;
    case CalibrationPart::link:
      return rates.upload_per_second > 0.0;
    case CalibrationPart::swap:
      return rates.read_per_second > 0.0;
  }
  return false;
}

void copy_part(CalibrationPart part, const plan::Rates& from, plan::Rates& to) {
  const auto copy = [&](auto... members) { ((to.*members = from.*members), ...); };
  using plan::Rates;
  switch (part) {
    case CalibrationPart::compute:
      return copy(&Rates::forward, &Rates::backward, &Rates::head, &Rates::attention,
                  &Rates::adapter_per_second, &Rates::device_memory_per_second,
                  &Rates::launch_seconds, &Rates::shared_cores, &Rates::compute_threads);
    case CalibrationPart::update:
      return copy(&Rates::update_per_second, &Rates::update_threads);
    case CalibrationPart::link:
      return copy(&Rates::upload_per_second, &Rates::offload_per_second, &Rates::peer_per_second,
                  &Rates::link_cores);
    case CalibrationPart::swap:
      return copy(&Rates::read_per_second, &Rates::write_per_second, &Rates::mixed_per_second,
                  &Rates::mixed_read_share, &Rates::io_latency_seconds, &Rates::io_cores);
  }
}

std::string part_key(CalibrationPart part, const engine::RunInputs& run) {
  const model::ModelConfig& m = run.model.config;
  std::string key = fmt::format(
      "{}: ballast {}, kernels {}; {}; {} CPUs; {} {} hidden {} intermediate {} heads {} of {}, {} "
      "wide, "
      "vocabulary {} tied {} blocks {}; ",
      to_string(part), version(), kernel_hash(), cpu_name(), usable_cpus(), to_string(run.type),
      m.family, m.hidden_size, m.intermediate_size, m.num_heads, m.num_kv_heads, m.head_dim,
      m.vocab_size, m.tie_embeddings, run.model.blocks.size());
  switch (part) {
    case CalibrationPart::compute: {
      const int named = run.devices.compute_threads;
      const int threads = named > 0 ? named : device::default_compute_threads();
      const bool alone = usual_accumulation(run.batch) == model::Accumulation::first;
      return key + describe_layers(computed_model(run, sample_run(run).model)) +
             fmt::format(
                 "device {} {}; {}, {} threads; "
                 "length {} "
                 "micro-batch {} {}",
                 describe_device(run.devices.first()), run.kernels.names,
                 model::host_kernels(threads), threads, run.batch.shape.length, run.batch.samples(),
                 alone ? "alone" : "of several");
    }
    case CalibrationPart::update:
      return key + fmt::format("threads {} isa {} of {} node {} states {} optimizer {}",
                               run.update.threads, run.update_isa, to_string(cpu_adam::active()),
                               run.update.numa_node.value_or(-1), run.state_type,
                               static_cast<int>(run.states.optimizer));
    case CalibrationPart::link:
      return key + fmt::format("device {} link {}{}", describe_device(run.devices.first()),
                               run.devices.link_gbps,
                               has_several_devices(run.devices) ? " of several devices" : "");
    case CalibrationPart::swap:
      return key + fmt::format("states {} optimizer {} paths {}", run.state_type,
                               static_cast<int>(run.states.optimizer), describe_paths(run));
  }
  return key;
}

std::string calibration_key(const engine::RunInputs& run) {
  std::string key;
  for (const CalibrationPart part : kParts) key += part_key(part, run) + "; ";
  return key;
}

}  // namespace ballast::calibrate
