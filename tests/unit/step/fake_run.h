#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ballast/plan/executor.h"
#include "ballast/plan/lane_times.h"
#include "ballast/plan/plan.h"
#include "ballast/step/labels.h"

namespace ballast::step {

/// A device that computes with numbers instead of tensors: every operation mixes its inputs into
/// its outputs, so that a missing edge changes the result.
class FakeMachine {
 public:
  explicit FakeMachine(std::size_t buffers) : values_(buffers, 1) {}

  void perform(const Operation& operation, std::uint64_t run) {
    std::uint64_t mix = (static_cast<std::uint64_t>(operation.action) << 32) ^
                        (operation.block * 8191U) ^ (operation.micro * 131U) ^ (run << 48);
    for (const Use& use : operation.uses) mix = (mix ^ values_[use.buffer]) * 0x9E3779B97F4A7C15U;
    for (const Use& use : operation.uses) {
      if (use.writes) values_[use.buffer] = mix ^ use.buffer;
    }
  }

  [[nodiscard]] const std::vector<std::uint64_t>& values() const { return values_; }

 private:
  std::vector<std::uint64_t> values_;
};

/// The spans of `runs` on a machine whose operations take random times, in the order of the plans:
/// each operation starts as soon as the executor's rules allow. Runs are numbered from 1. With
/// `one_at_a_time`, spans of a lane do not overlap, as in the executor's reports, not even those of
/// disk requests.
std::vector<plan::Span> fake_spans(const std::vector<const Plan*>& runs, std::uint64_t seed,
                                   bool one_at_a_time = false);

/// The content of a FakeMachine after serial execution.
std::vector<std::uint64_t> serial_result(const Schedule& schedule,
                                         const std::vector<const Plan*>& runs);

/// Uses of one buffer, at least one of them writing, that overlap in time or are in another order
/// than in the plans. One line each.
std::vector<std::string> find_conflicts(const Schedule& schedule,
                                        const std::vector<plan::Span>& spans);

/// Names an operation by its action.
inline std::string action_name(const Operation& operation) {
  return std::string(to_string(operation.action));
}

/// Submits `runs`, numbered from 1. With `patient`, waits for the gate of each before the next,
/// like a training loop. Otherwise the executor may overlap them as far as it allows.
inline void submit_all(plan::Executor& executor, const std::vector<const Plan*>& runs,
                       bool patient) {
  std::uint64_t number = 0;
  for (const Plan* plan : runs) {
    executor.submit(*plan, ++number);
    if (patient && plan->gate != kNoOp) executor.wait(plan->gate);
  }
  executor.drain();
}

}  // namespace ballast::step
