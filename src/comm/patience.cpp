#include "src/comm/patience.h"

#include <exception>

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::comm {

std::string to_text(const Collective& what) {
  if (what.bytes == 0) return std::string(what.name);
  return fmt::format("{} of {}", what.name, format_bytes(what.bytes));
}

Patience::Patience(const JoinOptions& options)
    : options_(options), exceptions_at_start_(std::uncaught_exceptions()) {}

void Patience::give_up() {
  std::string cause;
  if (const std::exception_ptr failure = std::current_exception()) {
    try {
      std::rethrow_exception(failure);
    } catch (const std::exception& error) {
      cause = std::string(": ") + error.what();
    } catch (...) {
      // Nothing that can be told.
    }
  }
  const std::scoped_lock lock(mutex_);
  if (!broken_) cause_ = cause;
  broken_ = true;
}

bool Patience::ends_quietly() const {
  return !broken_ && std::uncaught_exceptions() <= exceptions_at_start_;
}

void Patience::check(const Collective& what, double waited_seconds) const {
  if (options_.interrupted != nullptr && *options_.interrupted) {
    throw Error(ErrorCategory::interrupted, "interrupted in " + to_text(what));
  }
  if (broken_) {
    const std::scoped_lock lock(mutex_);
    throw Error(ErrorCategory::comm,
                to_text(what) + ": given up, because another collective failed before" + cause_);
  }
  if (waited_seconds > options_.timeout_seconds) {
    throw Error(ErrorCategory::comm,
                fmt::format("{}: not all ranks took part within {}; see what became of the others, "
                            "or raise ballast.comm_timeout_seconds",
                            to_text(what), format_seconds(options_.timeout_seconds)));
  }
}

}  // namespace ballast::comm
