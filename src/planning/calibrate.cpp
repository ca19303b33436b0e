#include "ballast/planning/calibrate.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <limits>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/build_info.h"
#include "ballast/core/cpu.h"
#include "ballast/core/error.h"
#include "ballast/core/log.h"
#include "ballast/core/seconds.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/device/host_stream.h"
#include "ballast/memory/topology.h"

#include "src/planning/calibration.h"
#include "src/planning/engine_inputs.h"

namespace ballast::planning {
namespace {

/// Limit for the sample's output matrix and its gradient.
constexpr Bytes kMatrixBytes = 224 * kMiB;
/// Limit for the buffers that are used in turn so that they are not in a cache.
constexpr Bytes kMostCold = 256 * kMiB;
/// Assumed cache size where it is unknown.
constexpr Bytes kSomeCache = 64 * kMiB;

/// One layer, as wide as a tile if layers are cut, and the head, whose rate hardly depends on the
/// size of a large vocabulary.
model::Architecture one_layer(const model::Architecture& model, DType type) {
  model::ModelConfig config = model::config_of_tile(model::without_experts(model.config));
  config.num_layers = 1;
  config.vocabulary_tiles = 1;
  // Lists have an entry per layer.
  for (auto& [key, value] : config.details) {
    if (value.is_array()) value = {};
  }
  const Bytes row = config.hidden_size * (size_of(type) + size_of(DType::f32));
  config.vocab_size = std::clamp<std::uint64_t>(kMatrixBytes / row, 1, config.vocab_size);
  return model::build_architecture(config);
}

using Clock = std::chrono::steady_clock;

/// Calls `work` repeatedly on its own thread, with pauses as long as the calls: in a step such work
/// comes in bursts too, and the scheduler favors a thread that wakes up.
class Bursts {
 public:
  explicit Bursts(const std::function<void()>& work)
      : thread_([this, work] {
          try {
            while (!stop_) {
              const auto start = Clock::now();
              work();
              end_ = Clock::now();
              busy_ += seconds_between(start, end_);
              std::this_thread::sleep_for(end_ - start);
            }
          } catch (...) {
            failure_ = std::current_exception();
          }
        }) {}
  ~Bursts() { join(); }
  Bursts(const Bursts&) = delete;
  Bursts& operator=(const Bursts&) = delete;

  /// Seconds in which `work` ran until `end`. Rethrows its exception. Call once.
  double finish(Clock::time_point end) {
    join();
    if (failure_) std::rethrow_exception(failure_);
    return busy_ - std::max(0.0, seconds_between(end, end_));
  }

 private:
  void join() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }

  std::atomic<bool> stop_ = false;
  double busy_ = 0.0;
  Clock::time_point end_ = Clock::now();
  std::exception_ptr failure_;
  std::thread thread_;
};

/// Relative speed of the compute lane while `work` runs concurrently; 1 means no slowdown. Computed
/// from the extra time of layer passes per second of work. Alternates both measurements, since the
/// machine may change its speed.
double speed_beside(const std::function<void()>& work, const Sample& sample,
                    const schedule::Rates& rates) {
  std::array<double, 3> speeds{};
  constexpr int kLeastPasses = 3;
  constexpr double kSeconds = 0.1;
  constexpr double kSlowest = 0.05;
  const auto pass = layer_passes(sample, rates);
  int passes = 0;
  const auto some_passes = [&](Clock::time_point start) {
    for (passes = 0; passes < kLeastPasses || seconds_since(start) < kSeconds;) {
      pass();
      ++passes;
    }
    return Clock::now();
  };
  pass();
  for (double& speed : speeds) {
    const auto start = Clock::now();
    const double alone = seconds_between(start, some_passes(start)) / passes;
    const auto begin = Clock::now();
    Bursts bursts(work);
    const auto end = some_passes(begin);
    const double longer = seconds_between(begin, end) - passes * alone;
    speed = 1.0 - longer / std::max(bursts.finish(end), 1e-9);
  }
  std::sort(speeds.begin(), speeds.end());
  return std::clamp(speeds[1], kSlowest, 1.0);
}

/// Measures the swap paths. Unusable ones are an error only if the config names NVMe.
void try_swap(const Sample& sample, schedule::Rates& rates) {
  try {
    measure_swap(sample, rates);
  } catch (const Error& error) {
    if (must_swap(sample.config) || error.category() != ErrorCategory::io) throw;
    log(LogLevel::warning,
        fmt::format("rates: the planner will not use NVMe, because it could not be measured: {}",
                    error.what()));
  }
}

std::string describe_paths(const config::Config& config) {
  if (!may_swap(config)) return "none";
  const state::SwapOptions options = swap_options(config);
  std::string text;
  for (const state::SwapPath& path : options.paths) {
    // The name of the run directory differs in every run.
    const auto place = path.made_later ? path.directory.parent_path() : path.directory;
    text +=
        fmt::format("{} {} block {} depth {} flight {} poll {} {} gbps {} {}; ", place.string(),
                    path.io.backend, path.io.block_bytes, path.io.depth, path.io.in_flight_bytes,
                    path.io.sqpoll, path.io.iopoll, path.read_gbps, path.write_gbps);
  }
  return text +
         (options.access == aio::File::Access::buffered ? "through the page cache" : "direct");
}

}  // namespace

double mean_seconds(const Repeats& repeats, const std::function<void()>& work,
                    const std::function<void()>& prepare) {
  work();
  std::vector<double> seconds;
  double total = 0.0;
  while (seconds.size() < repeats.least ||
         (total < repeats.seconds && seconds.size() < repeats.most)) {
    if (prepare) prepare();
    const auto start = Clock::now();
    work();
    seconds.push_back(seconds_since(start));
    total += seconds.back();
  }
  // Mean instead of median: a step's time is the sum of its operations' times. Calls that took more
  // than twice the median were disturbed by other work.
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  seconds.erase(std::upper_bound(seconds.begin(), seconds.end(), 2.0 * median), seconds.end());
  const double sum = std::accumulate(seconds.begin(), seconds.end(), 0.0);
  return std::max(sum / static_cast<double>(seconds.size()), 1e-9);
}

Sample make_sample(const config::Config& config, const model::Architecture& model) {
  constexpr Bytes kNoLimit = std::numeric_limits<Bytes>::max();
  config::Config one_sequence = config;
  one_sequence.batch.micro_batch = one_sequence.batch.accumulation = 1;
  one_sequence.data.pairs.clear();
  engine::Blueprint blueprint = outline(one_sequence, one_layer(model, config.type),
                                        {.device = kNoLimit, .host = kNoLimit}, {}, 1);
  const schedule::BlockPlacement on_host = {Tier::host, Tier::host, Tier::device};
  engine::place(blueprint, {std::vector(blueprint.model.blocks.size(), on_host)});
  return {.config = config,
          .blueprint = std::move(blueprint),
          .blocks = model.blocks.size(),
          .length = config.data.sequence_length,
          .last_level_cache = memory::read_topology().last_level_cache};
}

std::size_t cold_copies(const Sample& sample, Bytes bytes) {
  const Bytes cache = sample.last_level_cache > 0 ? sample.last_level_cache : kSomeCache;
  const Bytes cold = std::min(8 * cache, kMostCold);
  return std::clamp<std::size_t>((cold + bytes - 1) / bytes, 1, sample.blocks);
}

bool must_swap(const config::Config& config) {
  const std::array tiers = {config.zero.parameters.tier, config.zero.optimizer.tier,
                            config.ballast.activations, config.ballast.gradients};
  if (std::find(tiers.begin(), tiers.end(), Tier::nvme) != tiers.end()) return true;
  const auto& rules = config.ballast.placement;
  return std::any_of(rules.begin(), rules.end(), [](const config::PlacementRule& rule) {
    return rule.weights == Tier::nvme || rule.optimizer == Tier::nvme ||
           rule.activations == Tier::nvme || rule.gradients == Tier::nvme;
  });
}

bool may_swap(const config::Config& config) {
  return must_swap(config) || !config.zero.parameters.tier || !config.zero.optimizer.tier;
}

void Sample::check_interrupt() const {
  if (interrupted != nullptr && *interrupted) {
    throw Error(ErrorCategory::interrupted, "interrupted while measuring this machine");
  }
}

Calibration calibrate(const config::Config& config, const model::Architecture& model,
                      const std::atomic<bool>* interrupted) {
  Sample sample = make_sample(config, model);
  sample.interrupted = interrupted;
  sample.length = measurable_length(sample);
  Calibration result;
  result.rates.name = "this machine";
  bool repeated = false;
  const auto again = [&](const std::string& why) {
    if (!std::exchange(repeated, true)) {
      log(LogLevel::info, fmt::format("rates: {}; measuring again", why));
    }
  };
  const auto add = [&](const auto& measure) {
    const auto attempt = [&] {
      const CpuWatch watch;
      Attempt made = {.rates = result.rates};
      measure(sample, made.rates);
      sample.check_interrupt();
      made.others_share = watch.others_share();
      return made;
    };
    Calibration part = measure_undisturbed(attempt, again);
    result.rates = std::move(part.rates);
    if (result.disturbance.empty()) result.disturbance = std::move(part.disturbance);
  };
  // First, since a path that cannot be used ends it. Not repeated: while the disk works, the
  // kernel's own threads count as other work.
  if (may_swap(config)) try_swap(sample, result.rates);
  sample.check_interrupt();
  add(measure_compute);
  add(measure_update);
  add(measure_link);
  if (result.rates.shared_cores == 0) return result;
  add([](const Sample& one, schedule::Rates& rates) {
    rates.compute_beside_copy = speed_beside(uploads(one), one, rates);
  });
  if (result.rates.read_per_second > 0.0) {
    result.rates.compute_beside_io = speed_beside(fetches(sample), sample, result.rates);
  }
  sample.check_interrupt();
  return result;
}

model::Accumulation usual_accumulation(const config::Config& config) {
  const bool several = config.batch.automatic || config.batch.accumulation > 1;
  return several ? model::Accumulation::later : model::Accumulation::first;
}

std::string calibration_key(const config::Config& config, const model::Architecture& model) {
  const config::BallastSection& ballast = config.ballast;
  const model::ModelConfig& m = model.config;
  const int threads =
      ballast.compute_threads > 0 ? ballast.compute_threads : device::default_compute_threads();
  std::string key = fmt::format(
      "ballast {}; {}; {} CPUs; device {} attention {} products {}; compute threads {}; ",
      version(), cpu_name(), usable_cpus(),
      ballast.device + device::gpu_name({.kind = ballast.device, .type = config.type}),
      ballast.attention, ballast.product_algorithms, threads);
  key += fmt::format("update threads {} isa {} of {} node {} states {} optimizer {}; link {}; ",
                     ballast.update_threads, ballast.update_isa, to_string(cpu_adam::active()),
                     ballast.update_numa_node.value_or(-1), ballast.optimizer_states,
                     static_cast<int>(config.optimizer.type), ballast.link_gbps);
  key += fmt::format(
      "{} {} hidden {} intermediate {} heads {} of {}, {} wide, vocabulary {} tied {} blocks {} ",
      to_string(config.type), m.family, m.hidden_size, m.intermediate_size, m.num_heads,
      m.num_kv_heads, m.head_dim, m.vocab_size, m.tie_embeddings, model.blocks.size());
  key += fmt::format(
      "length {} micro-batch {} {}; swap {}", config.data.sequence_length, config.batch.micro_batch,
      usual_accumulation(config) == model::Accumulation::first ? "alone" : "of several",
      describe_paths(config));
  return key;
}

}  // namespace ballast::planning
