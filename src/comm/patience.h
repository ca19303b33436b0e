#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <string_view>

#include "ballast/comm/communicator.h"
#include "ballast/core/units.h"

namespace ballast::comm {

/// A collective, for messages.
struct Collective {
  std::string_view name;
  Bytes bytes;  ///< of the whole buffer
};

/// "all_gather of 3.00 MiB".
std::string to_text(const Collective& what);

/// How long the collectives of this process wait for other ranks, whatever carries them. Once one
/// was given up, those in other threads end too and nothing new starts. Thread-safe.
class Patience {
 public:
  explicit Patience(const JoinOptions& options);

  /// Throws when a wait of so many seconds must end: Error(interrupted), or Error(comm) when
  /// another collective failed or the timeout has passed.
  void check(const Collective& what, double waited_seconds) const;

  /// From now on check() throws. The exception that is being handled here, if any, is named as the
  /// cause: the first one that was.
  void give_up();
  /// Whether what is left to do can wait for the other ranks: nothing was given up, and no
  /// exception is under way in this thread that was not when this object was made.
  [[nodiscard]] bool ends_quietly() const;

 private:
  JoinOptions options_;
  int exceptions_at_start_;
  std::atomic<bool> broken_ = false;
  mutable std::mutex mutex_;
  std::string cause_;  ///< of the first failure, "" when that is not known
};

}  // namespace ballast::comm
