#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ballast/data/tokens.h"

namespace ballast::data {

/// A stream of tokens whose ids are not all checked yet.
struct UncheckedTokens {
  std::string key;  ///< key in the data section, for messages
  std::shared_ptr<const TokenSource> source;
};

/// Searches for ids outside the vocabulary: in all of a stream of up to 16 Mi tokens; otherwise in
/// 4 Mi tokens that are spread evenly, and at the start and end of each file. Returns whether
/// everything was checked. Logs a warning for a long stream of a single id. Throws like
/// TokenSource::read().
bool check_sample(const TokenSource& source);

/// Checks the rest of the data during a run, on a thread of the lowest priority that reads a tenth
/// of the time. With several ranks, each checks a part.
class IdCheck {
 public:
  /// Starts the thread if there is anything to check. `rank` is below `world`.
  IdCheck(std::vector<UncheckedTokens> unchecked, std::uint64_t rank, std::uint64_t world);
  /// Stops the thread.
  ~IdCheck();
  IdCheck(const IdCheck&) = delete;
  IdCheck& operator=(const IdCheck&) = delete;

  /// Throws the error found so far, if any: Error(data) with the key, file, token and id.
  void rethrow();
  /// Waits until everything is checked.
  void wait();

 private:
  void run();
  /// Checks a source piece by piece. Returns false if it was stopped.
  bool check(const TokenSource& source);
  /// Pauses the thread for `seconds`. Returns false if it was stopped.
  bool pause(double seconds);

  std::vector<UncheckedTokens> unchecked_;
  std::uint64_t rank_;
  std::uint64_t world_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  bool waiting_ = false;  ///< true: check without pauses
  std::exception_ptr found_;
  std::thread thread_;
};

}  // namespace ballast::data
