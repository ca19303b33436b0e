#pragma once

#include <cstdint>
#include <string>

#include "ballast/plan/plan.h"
#include "ballast/step/workload.h"

namespace ballast::step {

/// Words for the operations of plans in messages and traces; see Names.
class OperationNames {
 public:
  /// `workload`: that of the plans. It must outlive the object.
  explicit OperationNames(const Workload& workload) : work_(&workload) {}

  /// "backward of layer 3, micro-batch 1".
  std::string operator()(const plan::Operation& operation) const;
  /// "backward", "upload weights".
  [[nodiscard]] static std::string kind_of(const plan::Operation& operation);
  [[nodiscard]] const std::string& block_of(const plan::Operation& operation) const {
    return work_->blocks.at(operation.block).name;
  }

 private:
  const Workload* work_;
};

}  // namespace ballast::step
