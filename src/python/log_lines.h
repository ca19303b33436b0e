#pragma once

namespace ballast::python {

/// Collects the log lines of the libraries during its lifetime, then passes them to Python's logger
/// "ballast". Construct and destroy with the GIL.
class LogScope {
 public:
  LogScope();
  ~LogScope();
  LogScope(const LogScope&) = delete;
  LogScope& operator=(const LogScope&) = delete;
};

/// Passes on the collected lines. Needs the GIL. Python prints errors of the logger.
void pass_on_log_lines() noexcept;

}  // namespace ballast::python
