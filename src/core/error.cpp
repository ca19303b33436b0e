#include "ballast/core/error.h"

#include <array>
#include <system_error>

namespace ballast {
namespace {

/// Returns the message without line breaks and other characters that a terminal interprets.
std::string one_line(const std::string& message) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string line;
  line.reserve(message.size());
  for (const char c : message) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte != 0x7F) {
      line += c;
    } else {
      line += std::string("\\u00") + kDigits[byte >> 4U] + kDigits[byte & 0xFU];
    }
  }
  return line;
}

}  // namespace

std::string_view to_string(ErrorCategory category) noexcept {
  constexpr std::array<std::string_view, 10> kNames = {"usage",   "config",     "data", "io",
                                                       "memory",  "device",     "comm", "state",
                                                       "numeric", "interrupted"};
  return kNames[static_cast<std::size_t>(category)];
}

Error::Error(ErrorCategory category, const std::string& message)
    : std::runtime_error(one_line(message)), category_(category) {}

Error::Error(ErrorCategory category, const std::string& message, int error_number)
    : std::runtime_error(one_line(message) + ": " + std::generic_category().message(error_number)),
      category_(category),
      error_number_(error_number) {}

Error Error::with_context(std::string_view context) const {
  Error copy(category_, std::string(context) + ": " + what());
  copy.error_number_ = error_number_;
  return copy;
}

void expects(bool condition, std::string_view what) {
  if (!condition) throw Error(ErrorCategory::state, std::string(what));
}

}  // namespace ballast
