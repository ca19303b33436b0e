#include <algorithm>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/planning/planner.h"

#include "src/engine/outline.h"
#include "src/planning/planner.h"

namespace ballast::planning {
namespace {

using schedule::Lane;

/// Simulates changes one at a time.
class Improvements {
 public:
  Improvements(const Decision& decision, const Question& question)
      : decision_(decision), question_(question), now_(speed_of(decision)) {}

  std::vector<Variant> find() {
    more_tokens();
    open_placement();
    larger_budgets();
    faster_parts();
    constexpr double kWorthSaying = 1.02;
    std::erase_if(found_, [](const Variant& v) { return v.speedup < kWorthSaying; });
    std::stable_sort(found_.begin(), found_.end(),
                     [](const Variant& a, const Variant& b) { return a.speedup > b.speedup; });
    return std::move(found_);
  }

 private:
  static double speed_of(const Decision& decision) {
    return static_cast<double>(decision.blueprint.workload.tokens_per_step()) /
           decision.prediction.step_seconds;
  }

  void attempt(std::string change, const config::Config& config, const memory::Budgets& budgets,
               const schedule::Rates& rates) {
    const Question changed = {config,
                              question_.model,
                              budgets,
                              rates,
                              question_.world,
                              question_.kernel_memory_of,
                              question_.work_limit / 8};
    try {
      const double speed = speed_of(decide_with(changed));
      found_.push_back({std::move(change), speed, speed / now_});
    } catch (const Error& error) {
      // It does not fit, or needs what the machine lacks: no suggestion.
      const bool expected =
          error.category() == ErrorCategory::memory || error.category() == ErrorCategory::config;
      if (!expected) throw;
    }
  }

  void more_tokens() {
    for (const std::uint64_t factor : {2U, 4U}) {
      config::Config config = question_.config;
      config.batch.train_batch *= factor;
      config.batch.accumulation *= factor;
      attempt(fmt::format("{}x the tokens per step (train_batch_size {})", factor,
                          config.batch.train_batch),
              config, question_.budgets, question_.rates);
    }
  }

  void open_placement() {
    config::Config config = question_.config;
    config.zero.parameters.tier = std::nullopt;
    config.zero.optimizer.tier = std::nullopt;
    config.ballast.activations = std::nullopt;
    config.ballast.recompute = std::nullopt;
    config.ballast.order = "auto";
    config.ballast.placement.clear();
    config.zero.parameters.buffer_count = 0;
    config.zero.optimizer.buffer_count = 0;
    config.ballast.device_weight_buffers = 0;
    config.ballast.activation_buffers = 0;
    attempt("\"auto\" for every tier, for ballast.order and ballast.recompute, buffers left open",
            config, question_.budgets, question_.rates);
  }

  void larger_budgets() {
    if (!leaves_choices(question_.config)) return;
    const auto larger = [](Bytes bytes) { return bytes + bytes / 4; };
    const memory::Budgets& now = question_.budgets;
    attempt("25% more host memory (ballast.host_bytes)", question_.config,
            {now.device, larger(now.host)}, question_.rates);
    attempt("25% more device memory (ballast.device_bytes)", question_.config,
            {larger(now.device), now.host}, question_.rates);
  }

  [[nodiscard]] bool used(Lane lane) const {
    return decision_.prediction.bytes.at(static_cast<std::size_t>(lane)) > 0;
  }

  void faster(std::string change, std::initializer_list<double schedule::Rates::*> which) {
    schedule::Rates rates = question_.rates;
    for (const auto rate : which) rates.*rate *= 2.0;
    attempt(std::move(change), decision_.config, question_.budgets, rates);
  }

  void faster_parts() {
    using schedule::Rates;
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
    faster("an update twice as fast (ballast.update_threads, memory)", {&Rates::update_per_second});
  }

  const Decision& decision_;
  const Question& question_;
  double now_;
  std::vector<Variant> found_;
};

}  // namespace

std::vector<Variant> find_improvements_with(const Decision& decision, const Question& question) {
  return Improvements(decision, question).find();
}

}  // namespace ballast::planning
