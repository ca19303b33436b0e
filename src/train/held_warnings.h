#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/core/log.h"

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

}  // namespace ballast::train
