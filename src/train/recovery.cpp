#include "src/train/recovery.h"

#include <utility>

#include <fmt/format.h>

#include "ballast/comm/together.h"

namespace ballast::train {

using Action = config::SpikeSection::Action;

void Recovery::checkpoint_is(std::filesystem::path folder, std::uint64_t step) {
  newest_ = std::move(folder);
  newest_step_ = step;
}

void Recovery::made_progress() {
  resumes_ = 0;
  rollbacks_ = 0;
}

std::string Recovery::after_failure(std::uint64_t step, const StepFailure& failure) {
  // Other ranks wait in a collective that the failed one has left: they cannot agree on anything.
  if (config_.ballast.on_error != "resume" || world_ > 1 || newest_.empty()) throw failure;
  if (resumes_ == kMostResumes) {
    throw Error(failure.category(),
                fmt::format("step {}: {}; the run has gone back {} times without a new checkpoint "
                            "(ballast.on_error)",
                            step, failure.what(), resumes_));
  }
  ++resumes_;
  rollbacks_ = 0;  // the steps come again, with their spikes
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
  const bool resumable = newest_step_ < config_.ballast.steps || config_.ballast.save_weights;
  if (!newest_.empty() && resumable) {
    line += command_.empty() ? fmt::format("; the newest checkpoint is {}", newest_.string())
                             : fmt::format("; to go on from {}: {}", newest_.string(), command_);
  }
  if (dynamic_cast<const comm::JointError*>(&error) != nullptr) {
    throw comm::JointError(error.category(), line);
  }
  throw Error(error.category(), line);
}

}  // namespace ballast::train
