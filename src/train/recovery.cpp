#include "src/train/recovery.h"

#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "ballast/comm/agreement.h"
#include "ballast/core/error.h"

namespace ballast::train {

using Action = config::SpikeSection::Action;

void Recovery::checkpoint_is(std::filesystem::path folder, std::uint64_t step) {
  newest_ = std::move(folder);
  newest_step_ = step;
}

ResumedRun Recovery::go_back(RestartableEngine& engine, comm::Ranks* ranks,
                             const std::string& reason, std::uint64_t before, bool skip) {
  const auto announce = [&](const ResumedRun& found) {
    if (engine.blueprint().mesh.rank != 0) return;
    const std::uint64_t steps = before - found.facts.step;
    log(LogLevel::warning,
        fmt::format("{}; training continues from {}{}", reason, found.folder.string(),
                    skip ? fmt::format(" without the data of the {} step{} since then", steps,
                                       steps == 1 ? "" : "s")
                         : ""));
  };
  try {
    return as_step_failure([&] {
      engine.replace();
      return resume_run(*engine, config_, config_.ballast.out, ranks, before, announce);
    });
  } catch (const StepFailure&) {
    throw;
  } catch (const Error& error) {
    const ErrorCategory category = error.category();
    if (category == ErrorCategory::interrupted || category == ErrorCategory::comm) throw;
    refuse_to_go_back(reason, error);
  }
}

void Recovery::refuse_to_go_back(const std::string& reason, const Error& error) {
  if (error.category() == ErrorCategory::data) newest_.clear();
  const std::string line = fmt::format("{}; the run cannot go back: {}", reason, error.what());
  if (dynamic_cast<const comm::JointError*>(&error) != nullptr) {
    throw comm::JointError(error.category(), line);
  }
  throw Error(error.category(), line);
}

void Recovery::made_progress() {
  resumes_ = 0;
  rollbacks_ = 0;
}

std::string Recovery::after_failure(std::uint64_t step, const StepFailure& failure) {
  // The failed rank has left a collective in which the others wait, so they cannot agree on
  // anything.
  if (config_.ballast.on_error != config::OnError::resume || world_ > 1 || newest_.empty())
    throw failure;
  if (resumes_ == kMaxResumes) {
    throw StepFailure(failure.category(),
                      fmt::format("step {}: {}; the run has gone back {} times without a new "
                                  "checkpoint (ballast.on_error)",
                                  step, failure.what(), resumes_));
  }
  ++resumes_;
  rollbacks_ = 0;  // the steps run again, including their spikes
  return fmt::format("step {}: {}", step, failure.what());
}

std::string Recovery::after_spike(std::uint64_t step, const std::string& what) {
  const config::SpikeSection& spike = config_.ballast.spike;
  std::string message = fmt::format("step {}: {}", step, what);
  const auto stop = [&](const std::string& why) {
    throw comm::JointError(
        ErrorCategory::numeric,
        fmt::format("{}; lower the learning rate or check the data ({})", message, why));
  };
  if (spike.action == Action::stop) stop("ballast.spike is \"stop\"");
  if (newest_.empty()) stop("ballast.spike: there is no checkpoint yet to go back to");
  if (rollbacks_ == spike.most_rollbacks) {
    stop(
        fmt::format("ballast.spike.most_rollbacks: the run has gone back {} time{} without a new "
                    "checkpoint",
                    rollbacks_, rollbacks_ == 1 ? "" : "s"));
  }
  return fmt::format("{} (rollback {} of at most {})", message, ++rollbacks_, spike.most_rollbacks);
}

void Recovery::rethrow(const Error& error) const {
  std::string line = error.what();
  const RunEnd end(config_);
  const bool resumable = !end.is_reached_by(newest_step_) || config_.ballast.save_weights;
  if (!newest_.empty() && resumable) {
    // Weights saved at the end are also read from the swap space.
    const bool storage = dynamic_cast<const StepFailure*>(&error) != nullptr ||
                         error.category() == ErrorCategory::state;
    const bool older = config_.ballast.checkpoint_keep > 1;
    const std::string_view doubt = !storage ? ""
                                   : older  ? ", or from the one before if this has damaged it"
                                            : ", unless this has damaged it";
    const std::string which = fmt::format("{}{}", newest_.string(), doubt);
    line += command_.empty() ? fmt::format("; the latest checkpoint is {}", which)
                             : fmt::format("; to continue from {}: {}", which, command_);
  }
  if (dynamic_cast<const comm::JointError*>(&error) != nullptr) {
    throw comm::JointError(error.category(), line);
  }
  throw Error(error.category(), line);
}

}  // namespace ballast::train
