#pragma once

#include <functional>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/core/dtype.h"
#include "ballast/core/error.h"
#include "ballast/model/architecture.h"

namespace ballast::train {

/// Holds the warnings of the ranks back while a run is set up, so that rank 0 can print those that
/// all ranks have once. Replaces the log sink of the process; without `ranks` (nullptr), it does
/// nothing. Warnings of rank 0 are passed on immediately.
class HeldWarnings {
 public:
  explicit HeldWarnings(comm::Ranks* ranks);
  /// Restores the sink. Passes on what was not shared, for example after a failure of one rank.
  ~HeldWarnings();
  HeldWarnings(const HeldWarnings&) = delete;
  HeldWarnings& operator=(const HeldWarnings&) = delete;

  /// Logs the warnings of other ranks on rank 0, each once and with the number of its first rank,
  /// except for those that rank 0 has had too. Then warnings are no longer held. Collective.
  void share();

 private:
  void restore();

  comm::Ranks* ranks_;
  LogSink former_;
  bool holds_ = false;
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

/// Calls `work`, which sets a run up on all ranks, with held warnings, and shares them, also after
/// a comm::JointError.
void with_held_warnings(comm::Ranks* ranks, const std::function<void()>& work);

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
