#include <algorithm>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/plan/lane_times.h"
#include "ballast/planner/planner.h"

#include "src/planner/search.h"

namespace ballast::planner {
namespace {

using plan::Lane;

/// Simulates changes one at a time.
class Improvements {
 public:
  Improvements(const engine::Blueprint& blueprint, const plan::Prediction& prediction,
               const PlanRequest& request)
      : blueprint_(blueprint),
        prediction_(prediction),
        request_(request),
        now_(speed_of(blueprint, prediction)),
        written_(written_per_second(prediction)) {}

  std::vector<Improvement> find() {
    more_tokens();
    more_devices();
    share_head();
    open_placement();
    keep_attention();
    if (leaves_choices(request_.run)) larger_budgets(request_.run, "", 0.0);
    smaller_states();
    faster_parts();
    std::stable_sort(found_.begin(), found_.end(), [](const Improvement& a, const Improvement& b) {
      return a.speedup > b.speedup;
    });
    return std::move(found_);
  }

 private:
  static constexpr double kWorthSaying = 1.02;

  static double speed_of(const engine::Blueprint& blueprint, const plan::Prediction& prediction) {
    return static_cast<double>(blueprint.problem.tokens_per_step()) / prediction.step_seconds;
  }

  static double written_per_second(const plan::Prediction& prediction) {
    return static_cast<double>(prediction.bytes.at(static_cast<std::size_t>(Lane::writeback))) /
           prediction.step_seconds;
  }

  /// Keeps the change of settings or budgets if it makes the run faster than `at_least` tokens per
  /// second by kWorthSaying, or if it spares the drives and is as fast. Returns the speed with the
  /// change, 0 if nothing fits.
  double attempt(std::string change, const engine::RunInputs& run, const memory::Budgets& budgets,
                 double at_least = 0.0) {
    const bool same_model =
        run.model.config.vocabulary_tiles == request_.run.model.config.vocabulary_tiles;
    const PlanRequest changed = {.run = run,
                                 .budgets = budgets,
                                 .rates = request_.rates,
                                 .mesh = request_.mesh,
                                 .kernels = same_model ? request_.kernels : nullptr,
                                 .known_kernels = request_.known_kernels,
                                 .devices = request_.devices,
                                 .work_limit = request_.work_limit / 8,
                                 .interrupted = request_.interrupted};
    try {
      const std::optional<Decision> decision = try_decide(changed);
      if (!decision) return 0.0;
      const double speed = speed_of(decision->blueprint, decision->prediction);
      Improvement variant = {std::move(change), speed, speed / now_};
      if (written_ > 0.0) variant.wear = written_per_second(decision->prediction) / written_;
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
      engine::RunInputs run = request_.run;
      run.batch.train_batch *= factor;
      run.batch.accumulation *= factor;
      std::string keys = fmt::format("train_batch_size {}", run.batch.train_batch);
      if (!run.batch.automatic) {
        keys += fmt::format(", gradient_accumulation_steps {}", run.batch.accumulation);
      }
      attempt(fmt::format("{}x the tokens per step ({})", factor, keys), run, request_.budgets);
    }
  }

  /// Tries devices of the rank that the run does not use.
  void more_devices() {
    engine::RunInputs run = request_.run;
    for (const std::uint32_t count : larger_device_counts(request_)) {
      run.devices.count = count;
      attempt(fmt::format("{0} devices (pipeline.stages {0})", count), run, request_.budgets);
    }
  }

  /// Tries to share the head among the devices. Without tiles it is on one of them.
  void share_head() {
    engine::RunInputs run = request_.run;
    model::ModelConfig config = run.model.config;
    const std::uint32_t devices = blueprint_.problem.devices;
    if (config.vocabulary_tiles >= devices || !run.constraints.rules.empty()) return;
    config.vocabulary_tiles = devices;
    run.model = run.trained_like(config, run.model.split);
    attempt(fmt::format("the head in {0} tiles, which changes the rounding of results "
                        "(model.vocabulary_tiles {0})",
                        devices),
            run, request_.budgets);
  }

  void open_placement() {
    engine::RunInputs run = request_.run;
    run.constraints.placement = {};
    run.constraints.rules.clear();
    run.constraints.order.reset();
    run.constraints.buffers = step::kOpenBuffers;
    const std::string open =
        "\"auto\" for all tiers, ballast.order, ballast.recompute and the numbers of buffers";
    const double speed = attempt(open, run, request_.budgets);
    // If the run sets the tiers, more memory alone changes nothing.
    if (run.constraints != request_.run.constraints) larger_budgets(run, " with " + open, speed);
  }

  /// Tries what a run that sets which intermediates are recomputed could save. If that is open, the
  /// plan has made this choice.
  void keep_attention() {
    engine::RunInputs run = request_.run;
    std::optional<step::Kept>& kept = run.constraints.placement.kept;
    if (kept.value_or(step::Kept::attention) == step::Kept::attention) return;
    kept = step::Kept::attention;
    attempt("keeping the results of attention (ballast.recompute except_attention)", run,
            request_.budgets);
  }

  void larger_budgets(const engine::RunInputs& run, const std::string& also, double at_least) {
    const auto larger = [](Bytes bytes) { return bytes + bytes / 4; };
    const memory::Budgets& now = request_.budgets;
    attempt("25% more host memory (ballast.host_bytes)" + also, run, {now.device, larger(now.host)},
            at_least);
    attempt("25% more device memory (ballast.device_bytes)" + also, run,
            {larger(now.device), now.host}, at_least);
  }

  /// Tries 8-bit states, which take a third of the space.
  void smaller_states() {
    constexpr auto kSmallest = cpu_adam::Moments::Format::blockwise8;
    engine::RunInputs run = request_.run;
    if (!used(Lane::writeback) || run.states.moments == kSmallest) return;
    run.states.moments = kSmallest;
    attempt("moments in 8 bits, which changes results (ballast.optimizer_states 8bit)", run,
            request_.budgets);
  }

  [[nodiscard]] bool used(Lane lane) const {
    return prediction_.bytes.at(static_cast<std::size_t>(lane)) > 0;
  }

  void faster(std::string change, std::initializer_list<double plan::Rates::*> which) {
    plan::Rates rates = request_.rates;
    for (const auto rate : which) rates.*rate *= 2.0;
    const double speed = speed_of(blueprint_, plan::simulate(blueprint_.schedule, rates));
    // With more drives the written bytes are spread, so the wear cannot be compared by bytes.
    if (speed >= kWorthSaying * now_) found_.push_back({std::move(change), speed, speed / now_});
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

  const engine::Blueprint& blueprint_;
  const plan::Prediction& prediction_;
  const PlanRequest& request_;
  double now_;      ///< tokens per second
  double written_;  ///< to NVMe, bytes per second
  std::vector<Improvement> found_;
};

}  // namespace

std::vector<Improvement> find_improvements(const engine::Blueprint& blueprint,
                                           const plan::Prediction& prediction,
                                           const PlanRequest& request) {
  return Improvements(blueprint, prediction, request).find();
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
