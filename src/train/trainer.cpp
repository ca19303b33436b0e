#include "ballast/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "ballast/comm/together.h"
#include "ballast/core/cpu.h"
#include "ballast/core/error.h"
#include "ballast/core/log.h"
#include "ballast/memory/budget.h"
#include "ballast/planning/engine_inputs.h"
#include "ballast/planning/forecast.h"
#include "ballast/planning/machine_rates.h"
#include "ballast/planning/run_plan.h"
#include "ballast/train/loader.h"
#include "ballast/train/lr_schedule.h"
#include "ballast/train/trace.h"

#include "src/train/evaluate.h"
#include "src/train/initial_weights.h"
#include "src/train/run_checkpoints.h"
#include "src/train/run_files.h"
#include "src/train/saved_weights.h"
#include "src/train/training_data.h"

namespace ballast::train {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::string_view kTracedProcess = "ballast train";

double seconds_between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}

/// Everything that a run needs before it is planned.
struct Inputs {
  TrainingData data;
  std::unique_ptr<RunFiles> files;  ///< on rank 0
};

Inputs open_inputs(const config::Config& config, const comm::Launch& launch) {
  check_initial_weights(config);
  Inputs inputs = {.data = open_training_data(config)};
  planning::check_swap_paths(config, launch);
  return inputs;
}

/// One rank's part of a run, from data to summary.
class Trainer {
 public:
  /// `asked`: the config before planning, which keys the cached rates.
  Trainer(planning::RunPlan plan, const config::Config& asked, Inputs& inputs, Observer& observer,
          const std::atomic<bool>* interrupted, const RunOptions& options, comm::Ranks* ranks)
      : plan_(std::move(plan)),
        asked_(asked),
        inputs_(inputs),
        observer_(observer),
        options_(options),
        ranks_(ranks),
        rank_(ranks == nullptr ? 0 : ranks->rank()),
        world_(ranks == nullptr ? 1 : ranks->world()),
        local_world_(ranks == nullptr ? 1 : ranks->launch().local_world),
        engine_(
            std::move(plan_.decision.blueprint),
            planning::engine_options(config_, ranks == nullptr ? comm::Launch{} : ranks->launch()),
            RunCheckpoints::wanted(config_) ? nullptr : interrupted, ranks),
        rates_(config_.scheduler, config_.optimizer.lr),
        checkpoints_(engine_, config_, ranks, interrupted, options.checkpoint_now) {}

  /// Allocates everything for the first step.
  void prepare() {
    if (!first()) run_directory_.emplace(config_.ballast.out);  // its machine may be another one
    if (first() && !options_.trace.file.empty()) check_trace_file(options_.trace.file);
    if (first()) observer_.planned(engine_.blueprint(), engine_.device().description());
    prediction_ = planning::RunPrediction::find(asked_, engine_.blueprint());
    // The other ranks measure at the same time. The matrices are freed before the engine allocates.
    gemm_peak_ =
        model::measure_gemm_peak(engine_.device(), engine_.blueprint().type, seconds_to_measure());
    if (first() && config_.ballast.save_weights) {
      check_room_for_weights(config_, engine_.blueprint().model);
    }
    if (first() && RunCheckpoints::wanted(config_)) {
      check_room_for_checkpoints(engine_, config_.ballast.out, config_.ballast.checkpoint_keep,
                                 static_cast<std::uint32_t>(world_));
    }
    start_engine();
    loader_ =
        std::make_unique<Loader>(inputs_.data.training, inputs_.data.evaluation, loader_options());
    if (first()) warn_without_evaluation(config_, inputs_.data, loader_->evaluation().size());
  }

  void run() {
    if (first()) announce();
    filled_ = engine_.totals().nvme_bytes_by_path;
    started_ = Clock::now();
    last_step_end_ = started_;
    watch_ = CpuWatch();
    if (first() && !options_.trace.file.empty()) engine_.record(&timeline_);
    try {
      stopped_ = !run_steps();
      engine_.finish();
      ended_ = Clock::now();
      if (!stopped_) save();
    } catch (const Error& error) {
      save_what_was_traced();
      const bool interrupted = error.category() == ErrorCategory::interrupted;
      if (first() && done_ > 0 && (interrupted || ended_)) summarize(interrupted);
      throw;
    } catch (...) {
      save_what_was_traced();
      throw;
    }
    if (first()) summarize(stopped_);
  }

 private:
  [[nodiscard]] bool first() const { return rank_ == 0; }

  /// Writes the trace after its last step and waits for that step's updates.
  void end_trace(std::uint64_t step) {
    if (options_.trace.file.empty() ||
        step != std::min(options_.trace.steps, config_.ballast.steps))
      return;
    engine_.finish();
    settled_steps_ = 0;
    if (!first()) return;
    engine_.record(nullptr);
    trace_written_ = true;
    write_trace(options_.trace.file, kTracedProcess, timeline_, engine_.blueprint().workload);
    timeline_.spans = {};
  }

  /// Writes the trace of a run that fails. Only logs its own errors.
  void save_what_was_traced() {
    if (!first()) return;
    engine_.record(nullptr);
    if (options_.trace.file.empty() || trace_written_) return;
    try {
      write_trace(options_.trace.file, kTracedProcess, timeline_, engine_.blueprint().workload);
    } catch (const Error& error) {
      log(LogLevel::warning, error.what());
    }
  }

  /// A measurement of the peak must not take longer than the training of a tiny model.
  [[nodiscard]] double seconds_to_measure() const {
    constexpr double kSlowDevice = 1e12;  // FLOP/s
    const double flops =
        engine_.blueprint().flops_per_step() * static_cast<double>(config_.ballast.steps);
    return std::clamp(flops / kSlowDevice, 0.02, 0.3);
  }

  [[nodiscard]] LoaderOptions loader_options() const {
    return {.micro_batches = config_.batch.accumulation,
            .sequences = config_.batch.micro_batch,
            .length = config_.data.sequence_length,
            .first_step = resumed_.facts.step + 1,
            .rank = rank_,
            .world = world_};
  }

  /// False if a signal has ended the run after a checkpoint.
  bool run_steps() {
    for (std::uint64_t step = resumed_.facts.step + 1; step <= config_.ballast.steps; ++step) {
      run_step(step);
      const std::uint64_t before = checkpoints_.written();
      if (checkpoints_.after_step(step, [&] { return facts(step); })) return false;
      if (checkpoints_.written() > before) settled_steps_ = 0;
      last_step_end_ = Clock::now();
    }
    return true;
  }

  [[nodiscard]] CheckpointFacts facts(std::uint64_t step) {
    return {.step = step,
            .updates = engine_.updates(),
            .skipped_in_a_row = skipped_in_a_row_,
            .batch = config_.batch.train_batch,
            .length = config_.data.sequence_length,
            .metrics_bytes = first() ? inputs_.files->sync() : 0};
  }

  void start_engine() {
    if (options_.directory == RunDirectory::continued) {
      resumed_ = resume_run(engine_, config_, ranks_);
      skipped_in_a_row_ = resumed_.facts.skipped_in_a_row;
      done_ = resumed_.facts.step;
      if (first()) inputs_.files->continue_after(resumed_.facts.metrics_bytes);
      return;
    }
    start_from_weights(engine_, config_.initial_weights, [this](Bytes done, Bytes total) {
      if (first()) observer_.reading(done, total);
    });
  }

  void save() {
    if (!config_.ballast.save_weights) return;
    std::error_code ignored;
    const bool done_before = done_ == resumed_.facts.step &&
                             std::filesystem::exists(config_.ballast.out / kRunWeights, ignored);
    if (done_before) return;
    save_weights(engine_, config_, first(),
                 [this](Bytes done, Bytes total) { observer_.saving(done, total); });
    saved_ = config_.ballast.out / kRunWeights;
  }

  [[nodiscard]] std::string describe_update() {
    const auto& blocks = engine_.blueprint().placement.blocks;
    const auto on_gpu = engine_.device().kind() != "cuda"
                            ? 0
                            : std::count_if(blocks.begin(), blocks.end(), [](const auto& block) {
                                return block.optimizer == Tier::device;
                              });
    const std::string isa(engine_.update_isa());
    if (on_gpu == 0) return isa;
    return static_cast<std::size_t>(on_gpu) == blocks.size() ? "on the GPU"
                                                             : isa + " and on the GPU";
  }

  void announce() {
    const engine::EngineTotals totals = engine_.totals();
    const RunStart start = {.blueprint = engine_.blueprint(),
                            .device = engine_.device().description(),
                            .update_isa = describe_update(),
                            .io_backend = std::string(engine_.io_backend()),
                            .gemm_peak_flops = gemm_peak_,
                            .fill_seconds = totals.fill_seconds,
                            .filled_on_nvme = totals.nvme_bytes_written(),
                            .data = inputs_.data.summary,
                            .steps = config_.ballast.steps,
                            .resumed = resumed_.folder,
                            .resumed_step = resumed_.facts.step};
    inputs_.files->describe(print_for_another_run(asked_),
                            describe_run(start, options_.command, world_));
    observer_.started(start);
  }

  void run_step(std::uint64_t step) {
    const Batch batch = loader_->next();
    const double rate = rates_.at(engine_.updates() + 1);
    const engine::StepResult result = engine_.train_step(of_engine(batch), rate);
    const auto now = Clock::now();
    StepMetrics metrics = measure(batch, result, rate, seconds_between(last_step_end_, now));
    tokens_ += batch.real_tokens;
    training_seconds_ += metrics.step_seconds;
    note(metrics);
    last_loss_ = result.loss;
    done_ = step;
    end_trace(step);
    count_skips(result);
    const bool stuck = skipped_in_a_row_ >= config_.ballast.max_skipped_steps;
    const std::uint64_t every = config_.ballast.eval_every;
    const bool last = step == config_.ballast.steps;
    if (!stuck && (last || (every > 0 && step % every == 0))) evaluate_after(metrics);
    if (first()) report(metrics);
    if (stuck) give_up(step);
  }

  /// An interrupted evaluation does not lose the step.
  void evaluate_after(StepMetrics& metrics) {
    const auto start = Clock::now();
    try {
      metrics.eval_loss = evaluate_held_out();
    } catch (const Error& error) {
      if (first() && error.category() == ErrorCategory::interrupted) report(metrics);
      throw;
    }
    settled_steps_ = 0;
    evaluation_seconds_ += seconds_between(start, Clock::now());
    held_out_loss_ = metrics.eval_loss;
  }

  void report(const StepMetrics& metrics) {
    inputs_.files->write(metrics);
    const double pace = training_seconds_ / static_cast<double>(metrics.step - resumed_.facts.step);
    const auto left = static_cast<double>(config_.ballast.steps - metrics.step);
    observer_.stepped({.metrics = metrics,
                       .steps = config_.ballast.steps,
                       .gemm_share = gemm_share(metrics.step_seconds),
                       .eta_seconds = pace * left});
  }

  /// Rate and peak are of one rank. Above 1 if other work slowed the measurement of the peak.
  [[nodiscard]] double gemm_share(double step_seconds) const {
    if (gemm_peak_ <= 0.0 || step_seconds <= 0.0) return 0.0;
    return engine_.blueprint().flops_per_step() / step_seconds / gemm_peak_;
  }

  StepMetrics measure(const Batch& batch, const engine::StepResult& result, double rate,
                      double seconds) {
    StepMetrics metrics;
    metrics.step = batch.step;
    metrics.loss = result.loss;
    metrics.lr = rate;
    metrics.grad_norm = result.grad_norm;
    metrics.skipped = result.skipped;
    metrics.rolled_back = result.rolled_back;
    metrics.tokens = batch.real_tokens;
    metrics.step_seconds = seconds;
    metrics.tokens_per_second = static_cast<double>(metrics.tokens) / seconds;
    const engine::EngineTotals totals = engine_.totals();
    for (const schedule::Lane lane : schedule::kLanes) {
      const auto i = static_cast<std::size_t>(lane);
      const std::string name(to_string(lane));
      metrics.busy_seconds[name] = totals.lanes.busy_seconds[i] - before_.lanes.busy_seconds[i];
      metrics.stalled_seconds[name] =
          totals.lanes.stalled_seconds[i] - before_.lanes.stalled_seconds[i];
      metrics.bytes[name] = totals.lanes.bytes[i] - before_.lanes.bytes[i];
    }
    for (const Tier tier : kTiers) {
      metrics.peak_bytes[std::string(to_string(tier))] =
          totals.allocated[static_cast<std::size_t>(tier)];
    }
    metrics.nvme_bytes_written = totals.nvme_bytes_written();
    before_ = totals;
    return metrics;
  }

  /// Records the step's times for typical_step(). Skips the steps that fill the pipeline, at the
  /// start and after each wait for all updates or rollback.
  void note(const StepMetrics& metrics) {
    constexpr std::uint64_t kUnsettled = 2;
    constexpr std::size_t kMost = 1000;
    if (metrics.rolled_back) settled_steps_ = 0;
    if (settled_steps_++ < kUnsettled || steps_.size() == kMost) return;
    planning::MeasuredStep step = {.seconds = metrics.step_seconds};
    for (const schedule::Lane lane : schedule::kLanes) {
      step.busy_seconds[static_cast<std::size_t>(lane)] =
          metrics.busy_seconds.at(std::string(to_string(lane)));
    }
    steps_.push_back(step);
  }

  void count_skips(const engine::StepResult& result) {
    skipped_ += result.skipped ? 1 : 0;
    rolled_back_ += result.rolled_back ? 1 : 0;
    skipped_in_a_row_ = result.skipped ? skipped_in_a_row_ + 1 : 0;
  }

  [[noreturn]] void give_up(std::uint64_t step) const {
    throw Error(ErrorCategory::numeric,
                fmt::format("step {}: gradients were not finite in {} step{} in a row; lower the "
                            "learning rate or check the data (limit: ballast.max_skipped_steps)",
                            step, skipped_in_a_row_, skipped_in_a_row_ == 1 ? "" : "s"));
  }

  std::optional<double> evaluate_held_out() {
    const auto found =
        evaluate(engine_, loader_->evaluation(), config_.ballast.eval_batches, rank_, world_);
    if (!found) return std::nullopt;
    return found->loss;
  }

  /// Bytes per swap directory of this machine, from all its ranks, without the initial fill.
  [[nodiscard]] std::vector<Bytes> written_by_steps(const engine::EngineTotals& totals) const {
    std::vector<Bytes> own = totals.nvme_bytes_by_path;
    for (std::size_t p = 0; p < filled_.size(); ++p) own.at(p) -= filled_[p];
    return planning::written_by_machine(config_, local_world_, own);
  }

  /// Who interrupts a run does not want to wait for simulations.
  [[nodiscard]] std::string advice(const schedule::LaneTotals& lanes, bool interrupted) const {
    std::function<std::vector<planning::Variant>()> improvements;
    if (plan_.request && !interrupted) {
      improvements = [this] { return planning::find_improvements(plan_.decision, *plan_.request); };
    }
    return planning::advise(engine_.blueprint(), lanes, training_seconds_ + evaluation_seconds_,
                            improvements);
  }

  void summarize(bool interrupted) {
    const double steps = static_cast<double>(done_ - resumed_.facts.step);
    const engine::EngineTotals totals = engine_.totals();
    const double seconds = seconds_between(started_, ended_.value_or(Clock::now()));
    const auto typical = planning::typical_step(steps_);
    const double mean_seconds = training_seconds_ / std::max(steps, 1.0);
    std::optional<double> predicted;
    if (prediction_) predicted = prediction_->step_seconds();
    observer_.finished(
        {.blueprint = engine_.blueprint(),
         .steps = done_,
         .planned_steps = config_.ballast.steps,
         .interrupted = interrupted,
         .skipped = skipped_,
         .rolled_back = rolled_back_,
         .seconds = seconds,
         .training_seconds = training_seconds_,
         .tokens_per_second = static_cast<double>(tokens_) / std::max(training_seconds_, 1e-9),
         .gemm_share = gemm_share(mean_seconds),
         .predicted_seconds = predicted,
         .step_seconds = typical ? typical->seconds : mean_seconds,
         .corrected_rates =
             prediction_ && typical && prediction_->correct(*typical, watch_.others_share()),
         .last_loss = last_loss_,
         .held_out_loss = held_out_loss_,
         .totals = totals,
         .wear = planning::estimate_wear(written_by_steps(totals), seconds),
         .peak_resident = memory::peak_resident_bytes(),
         .weights = saved_,
         .checkpoint = checkpoints_.newest(),
         .advice = advice(totals.lanes, interrupted)});
  }

  planning::RunPlan plan_;  ///< without its blueprint, which the engine has taken
  const config::Config& config_ = plan_.decision.config;
  const config::Config& asked_;
  Inputs& inputs_;
  Observer& observer_;
  const RunOptions& options_;
  schedule::Timeline timeline_;  ///< of the steps to trace
  bool trace_written_ = false;
  comm::Ranks* ranks_;
  std::uint64_t rank_;
  std::uint64_t world_;
  std::uint32_t local_world_;  ///< ranks on this machine
  engine::Engine engine_;
  LrSchedule rates_;
  RunCheckpoints checkpoints_;
  Resumed resumed_;       ///< the part of the run that was before
  bool stopped_ = false;  ///< by a signal, after a checkpoint
  std::unique_ptr<Loader> loader_;
  std::optional<MadeDirectory> run_directory_;  ///< on other ranks than 0
  double gemm_peak_ = 0.0;
  Clock::time_point started_;
  Clock::time_point last_step_end_;
  std::optional<Clock::time_point> ended_;  ///< after the last step and its evaluation
  std::filesystem::path saved_;             ///< folder of the saved weights
  double training_seconds_ = 0.0;
  double evaluation_seconds_ = 0.0;
  std::optional<planning::RunPrediction> prediction_;
  CpuWatch watch_;  ///< since the first step
  std::vector<planning::MeasuredStep> steps_;
  std::uint64_t settled_steps_ = 0;  ///< since the start or the last wait for all updates
  std::uint64_t done_ = 0;           ///< steps
  std::uint64_t tokens_ = 0;         ///< trained on, without padding
  double last_loss_ = 0.0;
  std::optional<double> held_out_loss_;
  std::uint64_t skipped_ = 0;
  std::uint64_t skipped_in_a_row_ = 0;
  std::uint64_t rolled_back_ = 0;
  engine::EngineTotals before_;
  std::vector<Bytes> filled_;  ///< written to each NVMe path before the first step
};

}  // namespace

void check_inputs(const config::Config& config) {
  static_cast<void>(open_inputs(config, {}));
}

void train(const config::Config& config, Observer& observer, const std::atomic<bool>* interrupted,
           const RunOptions& options, comm::Ranks* ranks) {
  if (ranks != nullptr && ranks->world() == 1) ranks = nullptr;
  const bool first = ranks == nullptr || ranks->rank() == 0;
  Inputs inputs;
  // Before planning, which may measure the machine for a minute.
  comm::together(ranks, [&] {
    inputs = open_inputs(config, ranks == nullptr ? comm::Launch{} : ranks->launch());
    if (first) inputs.files = std::make_unique<RunFiles>(config.ballast.out, options.directory);
  });
  planning::RunPlan plan = planning::plan_run(config, ranks, interrupted);
  std::optional<Trainer> trainer;
  comm::together(ranks, [&] {
    trainer.emplace(std::move(plan), config, inputs, observer, interrupted, options, ranks);
  });
  comm::together(ranks, [&] { trainer->prepare(); });
  trainer->run();
}

}  // namespace ballast::train
