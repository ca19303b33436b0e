#pragma once

#include <cstdint>
#include <string>

#include "ballast/plan/plan.h"
#include "ballast/step/problem.h"

namespace ballast::step {

/// Names of plans' operations for messages and traces; see Names.
class OperationNames {
 public:
  /// `problem`: of the plans. It must outlive the object.
  explicit OperationNames(const Problem& problem) : problem_(&problem) {}

  /// Returns "backward of layer 3, micro-batch 1".
  std::string operator()(const plan::Operation& operation) const;
  /// Returns "backward" or "upload weights".
  [[nodiscard]] static std::string kind_of(const plan::Operation& operation);
  /// Number of devices of the plans.
  [[nodiscard]] std::uint32_t devices() const { return problem_->devices; }
  [[nodiscard]] const std::string& block_of(const plan::Operation& operation) const {
    return problem_->program().blocks.at(operation.block).name;
  }

 private:
  const Problem* problem_;
};

}  // namespace ballast::step
