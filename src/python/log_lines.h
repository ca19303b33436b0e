#pragma once

namespace ballast::python {

/// Collects the log lines of the libraries while it lives, then passes them to Python's logger
/// "ballast". Construct and destroy with the GIL.
class LogScope {
 public:
  LogScope();
  ~LogScope();
  LogScope(const LogScope&) = delete;
  LogScope& operator=(const LogScope&) = delete;
};

/// Passes on what has been collected. Needs the GIL. Errors of the logger are printed by Python.
void pass_on_log_lines() noexcept;

}  // namespace ballast::python
