#pragma once

#include <cstdint>
#include <string>

#include "ballast/schedule/plan.h"
#include "ballast/schedule/workload.h"

namespace ballast::schedule {

/// Words for the operations of plans in messages and traces; see Names.
class OperationNames {
 public:
  /// `workload`: that of the plans. It must outlive the object.
  explicit OperationNames(const Workload& workload) : work_(&workload) {}

  /// "backward of layer 3, micro-batch 1".
  std::string operator()(const Operation& operation) const;
  /// "backward", "upload weights".
  [[nodiscard]] static std::string kind_of(const Operation& operation);
  [[nodiscard]] const std::string& block_of(const Operation& operation) const {
    return work_->blocks.at(operation.block).name;
  }

 private:
  const Workload* work_;
};

}  // namespace ballast::schedule
