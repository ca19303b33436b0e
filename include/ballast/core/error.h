#pragma once

#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

namespace ballast {

/// Category of an error. It determines the program's exit status: 2 for `usage` and `config`, 1 for
/// all others.
enum class ErrorCategory {
  usage,
  config,
  data,
  io,
  memory,
  device,
  comm,
  state,
  numeric,
  interrupted
};

/// Name of a category as shown in messages, for example "config".
std::string_view to_string(ErrorCategory category) noexcept;

/// The exception type of all modules. `what()` is one line: what failed, where, and what to do.
class Error : public std::runtime_error {
 public:
  Error(ErrorCategory category, const std::string& message);
  /// For a failed system call: appends ": <strerror(error_number)>".
  Error(ErrorCategory category, const std::string& message, int error_number);

  [[nodiscard]] ErrorCategory category() const noexcept { return category_; }
  /// errno of the failed system call; 0 if none.
  [[nodiscard]] int error_number() const noexcept { return error_number_; }
  /// Returns the same error with the prefix `context` ("fetch block 3: ...").
  [[nodiscard]] Error with_context(std::string_view context) const;

 private:
  ErrorCategory category_;
  int error_number_ = 0;
};

/// Throws Error(state) with `what` if `condition`, a precondition between modules, is false.
/// Enabled in every build.
void expects(bool condition, std::string_view what);

enum class LogLevel { debug, info, warning };

/// Receives every log line of the libraries, which never print themselves.
using LogSink = std::function<void(LogLevel, std::string_view)>;

/// Installs `sink` for the process and returns the former one (thread-safe; an empty sink drops all
/// lines, the default).
LogSink set_log_sink(LogSink sink);

/// Passes one line, without newline, to the sink. Thread-safe.
void log(LogLevel level, std::string_view line);

/// Returns the candidate nearest to `word` by Damerau-Levenshtein distance, ignoring case; "" if
/// every distance is above max(2, a third of the word's length) or above half of the longer word.
std::string nearest(std::string_view word, std::span<const std::string> candidates);

/// Returns " (did you mean 'x'?)" or "".
std::string did_you_mean(std::string_view word, std::span<const std::string> candidates);

/// Returns "a, b, c".
std::string listed(std::span<const std::string> words);

}  // namespace ballast
