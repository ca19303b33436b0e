#include "ballast/core/error.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

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

namespace {

std::mutex& sink_mutex() {
  static std::mutex mutex;
  return mutex;
}

LogSink& sink() {
  static LogSink instance;
  return instance;
}

}  // namespace

LogSink set_log_sink(LogSink new_sink) {
  const std::scoped_lock lock(sink_mutex());
  return std::exchange(sink(), std::move(new_sink));
}

void log(LogLevel level, std::string_view line) {
  const std::scoped_lock lock(sink_mutex());
  if (sink()) sink()(level, line);
}

namespace {

/// Number of edits (insert, delete, replace, swap of neighbours) between `a` and `b`, ignoring
/// case.
std::size_t distance(std::string_view a, std::string_view b) {
  const auto same = [](char x, char y) {
    return std::tolower(static_cast<unsigned char>(x)) ==
           std::tolower(static_cast<unsigned char>(y));
  };
  std::vector<std::vector<std::size_t>> d(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (std::size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replace = d[i - 1][j - 1] + (same(a[i - 1], b[j - 1]) ? 0 : 1);
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, replace});
      if (i > 1 && j > 1 && same(a[i - 1], b[j - 2]) && same(a[i - 2], b[j - 1])) {
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
      }
    }
  }
  return d[a.size()][b.size()];
}

}  // namespace

std::string nearest(std::string_view word, std::span<const std::string> candidates) {
  std::size_t best = std::max<std::size_t>(2, word.size() / 3) + 1;
  std::string found;
  for (const auto& candidate : candidates) {
    const std::size_t longer = std::max(word.size(), candidate.size());
    if (longer - std::min(word.size(), candidate.size()) >= best) continue;  // insertions alone
    const std::size_t edits = distance(word, candidate);
    // Short words are near to any other word.
    const bool alike = 2 * edits <= longer;
    if (edits < best && alike) {
      best = edits;
      found = candidate;
    }
  }
  return found;
}

std::string did_you_mean(std::string_view word, std::span<const std::string> candidates) {
  const std::string found = nearest(word, candidates);
  return found.empty() ? std::string() : " (did you mean '" + found + "'?)";
}

std::string listed(std::span<const std::string> words) {
  std::string list;
  for (const std::string& word : words) list += (list.empty() ? "" : ", ") + word;
  return list;
}

}  // namespace ballast
