#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace ballast {

/// What kind of thing went wrong; decides the exit status of the program (`usage` and `config`: 2,
/// everything else: 1).
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

/// The place of a call. (std::source_location is not to be had with clang 14.)
struct SourceLocation {
  const char* file = "";
  unsigned line = 0;
  static constexpr SourceLocation current(const char* file = __builtin_FILE(),
                                          unsigned line = __builtin_LINE()) {
    return {file, line};
  }
};

/// Name of a category as shown in messages, for example "config".
std::string_view to_string(ErrorCategory category) noexcept;

/// The one exception type at module edges. `what()` is one line that says what, where and what to
/// do; it carries no stack trace. Thrown by value, caught by reference.
class Error : public std::runtime_error {
 public:
  /// `message`: one line. `where`: the throwing place, shown only in debug logs.
  Error(ErrorCategory category, const std::string& message,
        SourceLocation where = SourceLocation::current());

  /// Same, for a failed system call: appends ": <strerror(error_number)>".
  Error(ErrorCategory category, const std::string& message, int error_number,
        SourceLocation where = SourceLocation::current());

  [[nodiscard]] ErrorCategory category() const noexcept { return category_; }
  /// errno of the failed system call, 0 if none.
  [[nodiscard]] int error_number() const noexcept { return error_number_; }
  [[nodiscard]] const SourceLocation& where() const noexcept { return where_; }
  /// Same error with `context` put in front ("fetch block 3: ...").
  [[nodiscard]] Error with_context(std::string_view context) const;

 private:
  ErrorCategory category_;
  int error_number_ = 0;
  SourceLocation where_;
};

/// Throws Error(state) with `what` when `condition` is false: a broken promise between modules.
/// Always on; never used for I/O results, which are data.
void expects(bool condition, std::string_view what,
             SourceLocation where = SourceLocation::current());

}  // namespace ballast
