#pragma once

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

/// Source position of a call. (clang 14 lacks std::source_location.)
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

/// The exception type of all modules. `what()` is one line: what failed, where, and what to do.
class Error : public std::runtime_error {
 public:
  Error(ErrorCategory category, const std::string& message,
        SourceLocation where = SourceLocation::current());
  /// For a failed system call: appends ": <strerror(error_number)>".
  Error(ErrorCategory category, const std::string& message, int error_number,
        SourceLocation where = SourceLocation::current());

  [[nodiscard]] ErrorCategory category() const noexcept { return category_; }
  /// errno of the failed system call, 0 if none.
  [[nodiscard]] int error_number() const noexcept { return error_number_; }
  [[nodiscard]] const SourceLocation& where() const noexcept { return where_; }
  /// The same error with `context` as a prefix ("fetch block 3: ...").
  [[nodiscard]] Error with_context(std::string_view context) const;

 private:
  ErrorCategory category_;
  int error_number_ = 0;
  SourceLocation where_;
};

/// Throws Error(state) with `what` when `condition`, a precondition between modules, is false.
/// Enabled in every build.
void expects(bool condition, std::string_view what,
             SourceLocation where = SourceLocation::current());

}  // namespace ballast
