#include "src/python/run_observer.h"

#include <utility>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "ballast/train/metrics.h"

#include "src/python/module.h"
#include "tools/signals.h"

namespace ballast::python {

namespace nb = nanobind;

void RunObserver::planned(const engine::Blueprint& /*blueprint*/, const std::string& /*device*/) {}

void RunObserver::started(const train::RunStart& start) {
  const nb::gil_scoped_acquire acquire;
  pass_on_log_lines();
  if (!progress_.is_none()) progress_(start.resumed_step, start.steps, nb::none(), 0.0);
}

void RunObserver::stepped(const train::StepReport& report) {
  const nb::gil_scoped_acquire acquire;
  pass_on_log_lines();
  if (!progress_.is_none()) {
    const train::StepMetrics& metrics = report.metrics;
    progress_(metrics.step, report.steps, metrics.loss, metrics.tokens_per_second);
  }
  if (callback_.is_none() || stopped_) return;
  try {
    call(train::to_json_line(report.metrics));
  } catch (nb::python_error& error) {
    error_.emplace(std::move(error));
    stopped_ = true;
  }
  if (stopped_) tools::interrupt();
}

void RunObserver::call(const std::string& line) {
  const nb::object record = nb::module_::import_("json").attr("loads")(line);
  stopped_ = callback_(record).is(nb::bool_(false));
}

void RunObserver::finished(const train::RunSummary& summary) {
  summary_ = Summary{.steps = summary.steps,
                     .planned_steps = summary.planned_steps,
                     .interrupted = summary.interrupted,
                     .last_loss = summary.last_loss,
                     .held_out_loss = summary.held_out_loss,
                     .tokens_per_second = summary.tokens_per_second,
                     .weights = summary.weights.string(),
                     .checkpoint = summary.checkpoint.string(),
                     .advice = summary.advice};
}

void RunObserver::already_finished(const train::FinishedRun& run) {
  summary_ = Summary{.steps = run.steps,
                     .planned_steps = run.steps,
                     .last_loss = run.last_loss,
                     .weights = run.weights.string(),
                     .checkpoint = run.checkpoint.string()};
}

void RunObserver::throw_error_of_callback() {
  if (!error_) return;
  nb::python_error error = std::move(*error_);
  error_.reset();
  throw error;
}

nb::dict RunObserver::result() const {
  nb::dict result;
  result["directory"] = directory_;
  result["steps"] = summary_->steps;
  result["planned_steps"] = summary_->planned_steps;
  result["interrupted"] = summary_->interrupted;
  result["loss"] = summary_->last_loss;
  result["held_out_loss"] = summary_->held_out_loss;
  result["tokens_per_second"] = summary_->tokens_per_second;
  result["weights"] = summary_->weights;
  result["checkpoint"] = summary_->checkpoint;
  result["advice"] = summary_->advice;
  return result;
}

}  // namespace ballast::python
