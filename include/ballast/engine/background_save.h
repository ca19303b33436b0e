#pragma once

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "ballast/plan/plan.h"

namespace ballast::engine {

/// Saves buffers of host memory on a separate thread while training continues. A thread that is
/// about to write to one of them waits until it is saved.
class BackgroundSave {
 public:
  struct Part {
    plan::BufferId buffer = plan::kNoBuffer;
    std::function<void()> save;
  };

  /// Calls the `save` of each part in order, then `end`, all on the thread. After an error nothing
  /// more is called, and no thread waits any longer.
  BackgroundSave(std::vector<Part> parts, std::function<void()> end);
  /// Skips parts that have not begun.
  ~BackgroundSave();
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;

  /// Returns when `buffer` is saved, or if it is not one of the parts.
  void before_write(plan::BufferId buffer);
  /// Returns whether finish() would return immediately.
  [[nodiscard]] bool done() const;
  /// Waits for all parts and the end. Rethrows their exceptions. Call it once.
  void finish();
  /// Skips parts that have not begun; finish() then throws Error(state). The buffers may be freed
  /// when it returns.
  void cancel();

 private:
  void run();
  [[nodiscard]] bool next();

  std::vector<Part> parts_;
  std::function<void()> end_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t saved_ = 0;  ///< number of saved parts
  bool cancelled_ = false;
  bool done_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace ballast::engine
