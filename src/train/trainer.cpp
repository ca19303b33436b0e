#include "ballast/train/trainer.h"

#include <chrono>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ballast/calibrate/machine_rates.h"
#include "ballast/checkpoint/checkpoints.h"
#include "ballast/comm/agreement.h"
#include "ballast/core/error.h"
#include "ballast/data/loader.h"
#include "ballast/memory/machine.h"
#include "ballast/setup/run_plan.h"
#include "ballast/setup/setup.h"
#include "ballast/setup/translate.h"
#include "ballast/train/run_options.h"
#include "ballast/train/trace.h"

#include "src/data/training_data.h"
#include "src/train/initial_weights.h"
#include "src/train/recovery.h"
#include "src/train/run_checkpoints.h"
#include "src/train/run_directory.h"
#include "src/train/run_engine.h"
#include "src/train/run_files.h"
#include "src/train/run_inputs.h"
#include "src/train/run_measures.h"
#include "src/train/run_warnings.h"
#include "src/train/saved_weights.h"
#include "src/train/step_rules.h"

namespace ballast::train {
namespace {

using Clock = std::chrono::steady_clock;

/// One rank's part of a run, from data to summary.
class Trainer {
 public:
  /// `asked`: the config before planning, which is the key of the cached rates.
  Trainer(setup::RunPlan plan, const config::Config& asked, OpenedRun& inputs, Observer& observer,
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
        trace_(options.trace, inputs.trace),
        engine_(std::move(plan_.decision.blueprint),
                setup::engine_options(config_, ranks == nullptr ? comm::Launch{} : ranks->launch()),
                RunCheckpoints::wanted(config_) ? nullptr : interrupted, ranks),
        rates_(config_.scheduler, config_.optimizer.lr),
        loss_scaler_(config_),
        checkpoints_(engine_, config_, ranks, interrupted, options.checkpoint_now),
        spikes_(config_.ballast.spike),
        recovery_(config_, options.resuming, world_) {
    if (!RunCheckpoints::wanted(config_) && !resumes()) return;
    settings_ = data::settings_of_run(config_, inputs_.data.files, inputs_.data.tokens);
  }

  /// Allocates everything before the first step.
  void prepare() {
    warn_of_other_arithmetic(engine_->arithmetic(), ranks_);
    folders_.emplace(config_, engine_.blueprint(), ranks_);
    if (is_root()) observer_.planned(engine_.blueprint(), describe_devices(*engine_));
    prediction_ = calibrate::RunPrediction::find(setup::translate(asked_), engine_.blueprint(),
                                                 plan_.given_rates ? &*plan_.given_rates : nullptr);
    // All ranks measure at the same time. The matrices are freed before the engine allocates.
    gemm_peak_ = engine_.measure_gemm_peak(seconds_to_measure(engine_.blueprint(), end_.steps()));
    measures_.emplace(engine_, gemm_peak_);
    if (is_root() && config_.ballast.save_weights) {
      check_room_for_weights(config_, engine_.blueprint().model);
    }
    // A resumed run may reuse its swap files.
    check_room_for_checkpoints(*engine_, config_, ranks_, !resumes());
    start_engine();
    check_room_for_checkpoints(*engine_, config_, ranks_, false);
    start_loader();
    id_check_.emplace(std::move(inputs_.data.unchecked), rank_, world_);
    if (is_root())
      data::warn_without_evaluation(config_, inputs_.data, loader_->evaluation().size());
  }

  Ending run() {
    if (is_root()) announce();
    measures_->begin();
    if (is_root()) trace_.begin(*engine_);
    try {
      stopped_ = !run_steps();
      measures_->end();
      if (!stopped_) save();
      if (!stopped_) check_result();
    } catch (const Error& error) {
      engine_.leave(dynamic_cast<const comm::JointError*>(&error) != nullptr);
      save_what_was_traced();
      settle_checkpoint(true);
      const bool interrupted = error.category() == ErrorCategory::interrupted;
      if (is_root() && measures_->steps() > 0 && (interrupted || measures_->ended())) {
        summarize(interrupted);
      }
      if (interrupted) throw;
      recovery_.rethrow(error);
    } catch (const std::bad_alloc&) {
      engine_.leave(false);
      save_what_was_traced();
      settle_checkpoint(true);
      recovery_.rethrow(Error(ErrorCategory::memory, fmt::format("step {}: out of memory", step_)));
    } catch (...) {
      engine_.leave(false);
      save_what_was_traced();
      throw;
    }
    save_what_was_traced();  // of a run that was stopped early
    if (is_root()) summarize(stopped_);
    return stopped_ ? Ending::stopped : Ending::done;
  }

 private:
  [[nodiscard]] bool is_root() const { return rank_ == 0; }

  /// Ends the trace after its last step, when the updates of that step are done.
  void end_trace() {
    if (!trace_.ends_after(step_, end_)) return;
    as_step_failure([&] { engine_->finish(); });
    measures_->unsettle();
    if (is_root()) trace_.save(*engine_);
  }

  /// Writes the trace of an engine that has failed or is being replaced.
  void save_what_was_traced() {
    if (is_root() && engine_.exists()) trace_.save(*engine_);
  }

  void start_loader() {
    const Mesh& mesh = engine_.blueprint().mesh;
    const data::LoaderOptions options = {.micro_batches = config_.batch.accumulation,
                                         .sequences = config_.micro_sequences(),
                                         .length = config_.data.sequence_length,
                                         .first_step = done_ + 1,
                                         .skipped = skipped_batches_,
                                         .place = mesh.data_place(),
                                         .places = mesh.data,
                                         .cut = {mesh.sequence, mesh.sequence_place()}};
    loader_ =
        std::make_unique<data::Loader>(inputs_.data.training, inputs_.data.evaluation, options);
  }

  /// Returns false if a signal has ended the run after a checkpoint.
  bool run_steps() {
    std::string reason;  // reason to go back
    while (true) {
      try {
        if (!reason.empty()) go_back(reason, step_, false);
        return run_remaining_steps();
      } catch (const StepFailure& failure) {
        settle_checkpoint(true);
        reason = recovery_.after_failure(step_, failure);
      }
    }
  }

  bool run_remaining_steps() {
    while (!end_.is_reached_by(done_)) {
      step_ = done_ + 1;
      const std::string spike = run_step();
      if (!spike.empty()) {
        settle_checkpoint(false);
        go_back(recovery_.after_spike(step_, spike), step_, true);
        continue;
      }
      const RunCheckpoints::Done saved = checkpoints_.after_step(done_, [&] { return facts(); });
      if (saved.began) measures_->unsettle();
      if (saved.wrote) note_checkpoint();
      const bool complete = end_.is_reached_by(done_) && end_.is_complete(false, true);
      if (saved.stops && !complete) return false;
      measures_->go_on();
    }
    as_step_failure([&] { engine_->finish(); });
    return true;
  }

  void note_checkpoint() {
    recovery_.checkpoint_is(checkpoints_.newest(), checkpoints_.newest_step());
    recovery_.made_progress();
  }

  /// Completes the checkpoint in the background. If one rank has failed, the others may be
  /// elsewhere, and the checkpoint is lost.
  void settle_checkpoint(bool failed) {
    if (failed && ranks_ != nullptr) return;
    if (checkpoints_.settle()) note_checkpoint();
  }

  /// Continues from the latest checkpoint before step `before`, with a new engine. `skip`: skip the
  /// data of all steps since then.
  void go_back(const std::string& reason, std::uint64_t before, bool skip) {
    save_what_was_traced();
    loader_.reset();
    const std::uint64_t taken = step_ + skipped_batches_;
    agree_on_directory();
    take(recovery_.go_back(engine_, ranks_, reason, before, skip), true);
    if (skip) skipped_batches_ = taken - done_;
    start_loader();
    ++went_back_;
    measures_->unsettle();
    measures_->go_on();
  }

  /// Continues after a checkpoint whose states the engine has. `own`: it is this run's.
  void take(const ResumedRun& from, bool own) {
    done_ = from.facts.step;
    skipped_in_a_row_ = from.facts.skipped_in_a_row;
    skipped_batches_ = from.facts.skipped_batches;
    spikes_.restart(from.facts.losses);
    loss_scaler_.restart(from.facts.loss_scale);
    if (!own) return;
    recovery_.checkpoint_is(from.folder, done_);
    checkpoints_.continue_from(from.folder, done_);
    if (is_root()) inputs_.files->continue_after(from.facts);
  }

  [[nodiscard]] checkpoint::CheckpointFacts facts() {
    agree_on_directory();
    return {.step = done_,
            .updates = engine_->updates(),
            .skipped_in_a_row = skipped_in_a_row_,
            .batch = config_.batch.train_batch,
            .length = config_.data.sequence_length,
            .metrics_bytes = is_root() ? inputs_.files->sync() : 0,
            .skipped_batches = skipped_batches_,
            .losses = spikes_.losses(),
            .loss_scale = loss_scaler_.state(),
            .settings = settings_,
            .arithmetic = engine_->arithmetic()};
  }

  [[nodiscard]] bool resumes() const {
    return options_.directory == RunDirectory::continued || !options_.resume.empty();
  }

  void start_engine() {
    if (resumes()) {
      const SettingsCheck check = {settings_, options_.allowed_changes};
      constexpr std::uint64_t kAny = std::numeric_limits<std::uint64_t>::max();
      resumed_ =
          resume_run(*engine_, config_, resumed_from(config_, options_), ranks_, kAny, {}, &check);
      return take(resumed_, options_.directory == RunDirectory::continued);
    }
    start_from_weights(*engine_, config_, [this](Bytes done, Bytes total) {
      if (is_root()) observer_.reading(done, total);
    });
  }

  void save() {
    if (!config_.ballast.save_weights) return;
    if (done_ == resumed_.facts.step && has_saved_weights(config_, ranks_)) return;
    save_weights(*engine_, config_, is_root(),
                 [this](Bytes done, Bytes total) { observer_.saving(done, total); });
    saved_ = config_.ballast.out / formats::kRunWeights;
  }

  /// A run whose only result is a checkpoint of its last step has failed without it.
  void check_result() const {
    if (end_.is_complete(true, checkpoints_.has(done_))) return;
    throw comm::JointError(ErrorCategory::io,
                           fmt::format("step {}: the last step has no checkpoint, and its weights "
                                       "are not saved (ballast.save_weights), so the run has no "
                                       "result",
                                       done_));
  }

  void announce() {
    const engine::EngineTotals totals = engine_.totals();
    const RunStart start = {.blueprint = engine_.blueprint(),
                            .device = describe_devices(*engine_),
                            .update_isa = engine_.describe_update(),
                            .io_backend = totals.io_backend,
                            .gemm_peak_flops = gemm_peak_,
                            .fill_seconds = totals.fill_seconds,
                            .filled_on_nvme = totals.nvme_bytes_written(),
                            .data = inputs_.data.summary,
                            .rate = describe_rate(config_),
                            .steps = end_.steps(),
                            .resumed = resumed_.folder,
                            .resumed_step = resumed_.facts.step};
    const RunChoices choices = {.asked = asked_,
                                .used = config_,
                                .prediction = prediction_ ? &prediction_->prediction() : nullptr,
                                .changes = resumed_.changes};
    inputs_.files->describe(print_for_another_run(asked_),
                            describe_run(start, choices, options_.command, world_));
    observer_.started(start);
  }

  /// Runs step `step_`. Returns the problem of its loss if that must stop the run or take it back.
  std::string run_step() {
    const data::Batch batch = loader_->next();
    id_check_->rethrow();
    const double rate = rates_.at(engine_->updates() + 1);
    const engine::StepResult result = as_step_failure(
        [&] { return engine_->train_step(of_engine(batch), rate, loss_scaler_.scale()); });
    folders_->keep();
    StepMetrics metrics = measures_->step(batch, result, rate);
    metrics.skipped_batches = skipped_batches_;
    if (config_.type == DType::f16) metrics.loss_scale = loss_scaler_.scale();
    done_ = step_;
    end_trace();
    skipped_in_a_row_ = result.skipped ? skipped_in_a_row_ + 1 : 0;
    std::string spike = spikes_.add(metrics.loss);
    if (config_.ballast.spike.action == config::SpikeSection::Action::warn && !spike.empty()) {
      if (is_root()) log(LogLevel::warning, fmt::format("step {}: {}", step_, spike));
      spike.clear();
    }
    // A dynamic loss scale has its own limit.
    const bool stuck =
        !loss_scaler_.is_dynamic() && skipped_in_a_row_ >= config_.ballast.max_skipped_steps;
    const std::uint64_t every = config_.ballast.eval_every;
    const bool due = end_.is_last(step_) || (every > 0 && step_ % every == 0);
    if (due && !stuck && spike.empty()) evaluate_after(metrics);
    if (is_root()) report(metrics);
    if (stuck && spike.empty()) give_up();
    loss_scaler_.after_step(step_, result.skipped);
    return spike;
  }

  /// If an evaluation is interrupted, the step still counts.
  void evaluate_after(StepMetrics& metrics) {
    const auto start = Clock::now();
    try {
      const auto found = as_step_failure(
          [&] { return evaluate(*engine_, loader_->evaluation(), config_.ballast.eval_batches); });
      if (found) metrics.eval_loss = found->loss;
    } catch (const Error& error) {
      if (is_root() && error.category() == ErrorCategory::interrupted) report(metrics);
      throw;
    }
    measures_->unsettle();
    measures_->add_evaluation(std::chrono::duration<double>(Clock::now() - start).count());
    held_out_loss_ = metrics.eval_loss;
    if (!metrics.eval_loss || !(*metrics.eval_loss < config_.ballast.stop_at_loss)) return;
    if (is_root() && !end_.is_last(step_)) {
      log(LogLevel::info, fmt::format("step {}: the run ends at ballast.stop_at_loss", step_));
    }
    plan_.config.ballast.steps = step_;
    end_ = RunEnd(config_);
  }

  void report(const StepMetrics& metrics) {
    notice(inputs_.files->write(metrics));
    const auto left = static_cast<double>(end_.left_after(metrics.step));
    observer_.stepped({.metrics = metrics,
                       .steps = end_.steps(),
                       .gemm_share = measures_->gemm_share(metrics.step_seconds),
                       .eta_seconds = measures_->pace() * left});
  }

  /// Handles a run directory that rank 0 has found renamed or deleted.
  void notice(RunPlace::Fate fate) {
    if (fate == RunPlace::Fate::there) return;
    const std::filesystem::path& run = inputs_.files->directory();
    std::filesystem::path newest = checkpoints_.newest();
    if (fate == RunPlace::Fate::moved) {
      if (!newest.empty()) newest = run / checkpoint::kCheckpoints / newest.filename();
      plan_.config.ballast.out = run;
      moved_to_ = run;
      recovery_.forget_command();
    } else {
      // A complete checkpoint is written as soon as possible.
      if (RunCheckpoints::wanted(config_) && options_.checkpoint_now != nullptr) {
        options_.checkpoint_now->store(true);
      }
      newest.clear();
    }
    checkpoints_.newest_is(newest);
    recovery_.checkpoint_is(newest, newest.empty() ? 0 : checkpoints_.newest_step());
  }

  /// Tells the other ranks where rank 0 writes.
  void agree_on_directory() {
    if (ranks_ == nullptr) return;
    auto& out = plan_.config.ballast.out;
    out = ranks_->broadcast(out.string());
  }

  [[noreturn]] void give_up() const {
    throw comm::JointError(
        ErrorCategory::numeric,
        fmt::format("step {}: gradients were not finite in {} step{} in a row; lower the "
                    "learning rate or check the data (limit: ballast.max_skipped_steps)",
                    step_, skipped_in_a_row_, skipped_in_a_row_ == 1 ? "" : "s"));
  }

  void summarize(bool interrupted) {
    RunSummary summary = {
        .blueprint = engine_.blueprint(),
        .steps = done_,
        .planned_steps = end_.steps(),
        .interrupted = interrupted,
        .went_back = went_back_,
        .held_out_loss = held_out_loss_,
        .peak_resident = memory::peak_resident_bytes(),
        .weights = saved_,
        .checkpoint = checkpoints_.newest(),
        .lacks_checkpoint = RunCheckpoints::wanted(config_) && !checkpoints_.has(done_),
        .trace = trace_.file(),
        .moved_to = moved_to_};
    measures_->summarize(summary, prediction_ ? &*prediction_ : nullptr);
    // Sum over all ranks of this machine.
    summary.wear = setup::estimate_wear(
        setup::written_by_machine(config_, local_world_, measures_->written()), summary.seconds);
    summary.advice = measures_->advice(summary.totals.lanes, plan_, interrupted);
    observer_.finished(summary);
  }

  setup::RunPlan plan_;  ///< without its blueprint, which the engine has taken
  const config::Config& config_ = plan_.config;
  RunEnd end_{config_};
  const config::Config& asked_;
  OpenedRun& inputs_;
  Observer& observer_;
  const RunOptions& options_;
  comm::Ranks* ranks_;
  std::uint64_t rank_;
  std::uint64_t world_;
  std::uint32_t local_world_;  ///< ranks on this machine
  RunTrace trace_;
  std::optional<RunFolders> folders_;
  RestartableEngine engine_;
  LrSchedule rates_;
  LossScaler loss_scaler_;
  RunCheckpoints checkpoints_;
  Spikes spikes_;
  Recovery recovery_;
  config::Settings settings_;  ///< settings that determine results, for checkpoints
  ResumedRun resumed_;         ///< the earlier part of the run
  bool stopped_ = false;       ///< whether a signal stopped the run after a checkpoint
  std::unique_ptr<data::Loader> loader_;
  std::optional<data::IdCheck> id_check_;
  double gemm_peak_ = 0.0;
  std::optional<RunMeasures> measures_;
  std::filesystem::path saved_;     ///< folder of the saved weights
  std::filesystem::path moved_to_;  ///< the run directory, if it was renamed
  std::optional<calibrate::RunPrediction> prediction_;
  std::uint64_t step_ = 0;  ///< current or last step
  std::uint64_t done_ = 0;  ///< finished steps
  std::uint64_t skipped_in_a_row_ = 0;
  std::uint64_t skipped_batches_ = 0;
  std::uint64_t went_back_ = 0;
  std::optional<double> held_out_loss_;
};

}  // namespace

void check_inputs(const config::Config& config) {
  static_cast<void>(open_inputs(config, {}));
}

Ending train(const config::Config& asked, Observer& observer, const std::atomic<bool>* interrupted,
             const RunOptions& options, comm::Ranks* ranks) {
  if (ranks != nullptr && ranks->world() == 1) ranks = nullptr;
  OpenedRun inputs;
  RunOptions chosen = options;
  config::Config config = asked;
  std::optional<Trainer> trainer;
  with_held_warnings(ranks, [&] {
    // Checked before planning, which may measure the machine for a minute.
    if (!open_run(config, observer, ranks, chosen, inputs)) return;
    config = with_pad_token_of_checkpoint(settle_tiles(config, ranks, interrupted, chosen), chosen,
                                          ranks);
    setup::RunPlan plan = setup::plan_run(config, ranks, interrupted, options.source);
    comm::collective_try(ranks, [&] {
      trainer.emplace(std::move(plan), config, inputs, observer, interrupted, chosen, ranks);
    });
    comm::collective_try(ranks, [&] { trainer->prepare(); });
  });
  return trainer ? trainer->run() : Ending::done;
}

}  // namespace ballast::train
