#include <algorithm>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/inputs/engine_inputs.h"
#include "ballast/plan/lane_times.h"
#include "ballast/planner/run_plan.h"

#include "src/planner/search.h"

namespace ballast::planner {
namespace {

using plan::Lane;

/// Simulates changes one at a time.
class Improvements {
 public:
  Improvements(const Decision& decision, const PlanRequest& request)
      : decision_(decision),
        request_(request),
        now_(speed_of(decision)),
        written_(written_per_second(decision.prediction)) {}

  std::vector<Improvement> find() {
    more_tokens();
    more_devices();
    share_head();
    open_placement();
    keep_attention();
    if (leaves_choices(request_.config)) larger_budgets(request_.config, "", 0.0);
    smaller_states();
    faster_parts();
    std::stable_sort(found_.begin(), found_.end(), [](const Improvement& a, const Improvement& b) {
      return a.speedup > b.speedup;
    });
    return std::move(found_);
  }

 private:
  static constexpr double kWorthSaying = 1.02;

  static double speed_of(const Decision& decision) {
    // The engine may have taken the blueprint.
    const config::DataSection& data = decision.config.data;
    return static_cast<double>(decision.config.batch.train_batch * data.sequences_per_sample() *
                               data.sequence_length) /
           decision.prediction.step_seconds;
  }

  static double written_per_second(const plan::Prediction& prediction) {
    return static_cast<double>(prediction.bytes.at(static_cast<std::size_t>(Lane::writeback))) /
           prediction.step_seconds;
  }

  /// Keeps the change if it makes the run faster than `at_least` tokens per second by kWorthSaying,
  /// or if it spares the drives and is as fast. Returns the speed with the change, 0 if nothing
  /// fits.
  double attempt(std::string change, const config::Config& config, const memory::Budgets& budgets,
                 const plan::Rates& rates, double at_least = 0.0) {
    const bool same_model = config.model.vocabulary_tiles == request_.config.model.vocabulary_tiles;
    const PlanRequest changed = {.config = config,
                                 .model = same_model ? request_.model : inputs::model_of(config),
                                 .budgets = budgets,
                                 .rates = rates,
                                 .mesh = request_.mesh,
                                 .kernels = same_model ? request_.kernels : nullptr,
                                 .known_kernels = request_.known_kernels,
                                 .devices = request_.devices,
                                 .work_limit = request_.work_limit / 8,
                                 .interrupted = request_.interrupted};
    try {
      const std::optional<Decision> decision = try_decide(changed);
      if (!decision) return 0.0;
      const double speed = speed_of(*decision);
      Improvement variant = {std::move(change), speed, speed / now_};
      // With more drives the written bytes are spread, so the wear cannot be compared by bytes.
      const bool same_machine = &rates == &request_.rates;
      if (written_ > 0.0 && same_machine) {
        variant.wear = written_per_second(decision->prediction) / written_;
      }
      const bool faster = speed >= kWorthSaying * std::max(now_, at_least);
      // A change that is combined with another must add to it.
      const bool alone = at_least == 0.0;
      const bool spares = alone && variant.spares_drives() && speed >= now_;
      if (faster || spares) found_.push_back(std::move(variant));
      return speed;
    } catch (const Error& error) {
      // The machine lacks something that the change needs.
      if (error.category() == ErrorCategory::config) return 0.0;
      if (error.category() == ErrorCategory::memory) return 0.0;  // on its drives
      throw;
    }
  }

  void more_tokens() {
    for (const std::uint64_t factor : {2U, 4U}) {
      config::Config config = request_.config;
      config.batch.train_batch *= factor;
      config.batch.accumulation *= factor;
      std::string keys = fmt::format("train_batch_size {}", config.batch.train_batch);
      if (!config.batch.automatic) {
        keys += fmt::format(", gradient_accumulation_steps {}", config.batch.accumulation);
      }
      attempt(fmt::format("{}x the tokens per step ({})", factor, keys), config, request_.budgets,
              request_.rates);
    }
  }

  /// Tries devices of the rank that the config does not use.
  void more_devices() {
    config::Config config = request_.config;
    for (const std::uint32_t count : larger_device_counts(request_)) {
      config.pipeline.stages = count;
      attempt(fmt::format("{0} devices (pipeline.stages {0})", count), config, request_.budgets,
              request_.rates);
    }
  }

  /// Tries to share the head among the devices. Without tiles it is on one of them.
  void share_head() {
    config::Config config = request_.config;
    const std::uint32_t devices = decision_.blueprint.problem.devices;
    std::uint64_t& tiles = config.model.vocabulary_tiles;
    if (tiles >= devices || !config.ballast.placement.empty()) return;
    tiles = devices;
    attempt(fmt::format("the head in {0} tiles, which changes the rounding of results "
                        "(model.vocabulary_tiles {0})",
                        devices),
            config, request_.budgets, request_.rates);
  }

  void open_placement() {
    config::Config config = request_.config;
    config.zero.parameters.tier = std::nullopt;
    config.zero.optimizer.tier = std::nullopt;
    config.ballast.activations = std::nullopt;
    config.ballast.gradients = std::nullopt;
    config.ballast.kept = std::nullopt;
    config.ballast.order = std::nullopt;
    config.ballast.placement.clear();
    config.buffers = config::kOpenBuffers;
    const std::string open =
        "\"auto\" for all tiers, ballast.order, ballast.recompute and the numbers of buffers";
    const double speed = attempt(open, config, request_.budgets, request_.rates);
    // If the config sets the tiers, more memory alone changes nothing.
    if (config::print(config) != config::print(request_.config)) {
      larger_budgets(config, " with " + open, speed);
    }
  }

  /// Tries what a config that names which intermediates are recomputed could save. With "auto" the
  /// plan has made this choice.
  void keep_attention() {
    if (request_.config.ballast.kept.value_or(step::Kept::attention) == step::Kept::attention) {
      return;
    }
    config::Config config = request_.config;
    config.ballast.kept = step::Kept::attention;
    attempt("keeping the results of attention (ballast.recompute except_attention)", config,
            request_.budgets, request_.rates);
  }

  void larger_budgets(const config::Config& config, const std::string& also, double at_least) {
    const auto larger = [](Bytes bytes) { return bytes + bytes / 4; };
    const memory::Budgets& now = request_.budgets;
    attempt("25% more host memory (ballast.host_bytes)" + also, config,
            {now.device, larger(now.host)}, request_.rates, at_least);
    attempt("25% more device memory (ballast.device_bytes)" + also, config,
            {larger(now.device), now.host}, request_.rates, at_least);
  }

  /// Tries 8-bit states, which take a third of the space.
  void smaller_states() {
    constexpr auto kSmallest = cpu_adam::Moments::Format::blockwise8;
    config::Config config = request_.config;
    if (!used(Lane::writeback) || config.ballast.optimizer_states == kSmallest) return;
    config.ballast.optimizer_states = kSmallest;
    attempt("moments in 8 bits, which changes results (ballast.optimizer_states 8bit)", config,
            request_.budgets, request_.rates);
  }

  [[nodiscard]] bool used(Lane lane) const {
    return decision_.prediction.bytes.at(static_cast<std::size_t>(lane)) > 0;
  }

  void faster(std::string change, std::initializer_list<double plan::Rates::*> which) {
    plan::Rates rates = request_.rates;
    for (const auto rate : which) rates.*rate *= 2.0;
    attempt(std::move(change), decision_.config, request_.budgets, rates);
  }

  void faster_parts() {
    using plan::Rates;
    if (used(Lane::fetch) || used(Lane::writeback)) {
      faster("twice the drives",
             {&Rates::read_per_second, &Rates::write_per_second, &Rates::mixed_per_second});
    }
    if (used(Lane::upload) && used(Lane::offload)) {
      faster("a link twice as fast", {&Rates::upload_per_second, &Rates::offload_per_second});
    }
    if (used(Lane::gather) || used(Lane::reduce)) {
      faster("a network twice as fast", {&Rates::fabric_per_second, &Rates::network_per_second});
    }
    if (used(Lane::peer) && request_.rates.peer_per_second > 0.0) {
      faster("copies between devices twice as fast", {&Rates::peer_per_second});
    }
    faster("an update twice as fast (ballast.update_threads, memory)", {&Rates::update_per_second});
  }

  const Decision& decision_;
  const PlanRequest& request_;
  double now_;      ///< tokens per second
  double written_;  ///< to NVMe, bytes per second
  std::vector<Improvement> found_;
};

}  // namespace

std::vector<Improvement> find_improvements(const Decision& decision, const PlanRequest& request) {
  return Improvements(decision, request).find();
}

std::string describe_idle_devices(const step::Problem& problem) {
  if (problem.micro_batches >= problem.devices) return "";
  return fmt::format(
      "{} micro-batch{} per step cannot keep {} devices busy at once; give at least {} "
      "(gradient_accumulation_steps)",
      problem.micro_batches, problem.micro_batches == 1 ? "" : "es", problem.devices,
      problem.devices);
}

std::string advise(const engine::Blueprint& blueprint, const plan::LaneTotals& lanes,
                   double seconds, const std::function<std::vector<Improvement>()>& improvements) {
  if (seconds <= 0.0) return "no step was run";
  const plan::Bottleneck bottleneck = plan::find_bottleneck(lanes.busy_seconds, seconds);
  std::string text = fmt::format("At {} tokens per step the run is {}.",
                                 blueprint.problem.tokens_per_step(), describe(bottleneck));
  if (const std::string idle = describe_idle_devices(blueprint.problem); !idle.empty()) {
    text += fmt::format(" {}.", idle);
  }
  if (bottleneck.bound_by_compute()) return text;
  if (!improvements) return text + " `ballast plan` simulates changes.";
  const std::vector<Improvement> variants = improvements();
  if (variants.empty()) return text + " No simulated change makes it faster.";
  return fmt::format("{} Simulated: {} would be {:.2f}x as fast.", text, variants.front().change,
                     variants.front().speedup);
}

}  // namespace ballast::planner
