#pragma once

#include <mutex>
#include <set>
#include <span>
#include <string>

#include "ballast/core/dtype.h"
#include "ballast/model/architecture.h"

namespace ballast::train {

/// Finds router weights in files that the training type cannot represent. transformers computes
/// the routers of some families with fp32 weights, and saves them as F32. Ballast's routers compute
/// with weights of the training type, so a run that begins with such weights reports it.
class RoundedRouters {
 public:
  /// `type`: the training type.
  RoundedRouters(const model::Architecture& model, DType type);

  /// Examines values of a tensor that were read from files. Thread-safe.
  void add(const model::TensorSpec& tensor, std::span<const float> values);
  /// Returns a line about the weights that were found; "" if there are none.
  [[nodiscard]] std::string warning() const;

 private:
  DType type_;
  std::set<std::string> routers_;  ///< names of the model's router weights
  std::set<std::string> rounded_;
  mutable std::mutex mutex_;
};

}  // namespace ballast::train
