#pragma once

#include <mutex>
#include <string>
#include <string_view>

#include "ballast/core/error.h"

namespace ballast::test {

/// Collects the log lines of the libraries during its lifetime. Thread-safe.
class CapturedLog {
 public:
  CapturedLog() {
    set_log_sink([this](LogLevel, std::string_view line) {
      const std::scoped_lock lock(mutex_);
      text_ += std::string(line) + "\n";
    });
  }
  ~CapturedLog() { set_log_sink({}); }
  CapturedLog(const CapturedLog&) = delete;
  CapturedLog& operator=(const CapturedLog&) = delete;

  [[nodiscard]] std::string text() const {
    const std::scoped_lock lock(mutex_);
    return text_;
  }

 private:
  mutable std::mutex mutex_;
  std::string text_;
};

}  // namespace ballast::test
