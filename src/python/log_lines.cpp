#include "src/python/log_lines.h"

#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>

#include "ballast/core/log.h"

namespace ballast::python {
namespace {

namespace nb = nanobind;

struct Lines {
  std::mutex mutex;
  std::vector<std::pair<LogLevel, std::string>> all;
};

Lines& lines() {
  static auto* const collected = new Lines;  // threads may log until the process ends
  return *collected;
}

const char* method_of(LogLevel level) {
  switch (level) {
    case LogLevel::debug:
      return "debug";
    case LogLevel::info:
      return "info";
    case LogLevel::warning:
      return "warning";
  }
  return "info";
}

}  // namespace

LogScope::LogScope() {
  set_log_sink([](LogLevel level, std::string_view line) {
    const std::scoped_lock lock(lines().mutex);
    lines().all.emplace_back(level, line);
  });
}

LogScope::~LogScope() {
  set_log_sink({});
  pass_on_log_lines();
}

void pass_on_log_lines() noexcept {
  std::vector<std::pair<LogLevel, std::string>> passed;
  {
    const std::scoped_lock lock(lines().mutex);
    passed.swap(lines().all);
  }
  if (passed.empty()) return;
  const nb::error_scope pending;
  try {
    const nb::object logger = nb::module_::import_("logging").attr("getLogger")("ballast");
    for (const auto& [level, line] : passed) {
      logger.attr(method_of(level))("%s", nb::str(line.data(), line.size()));
    }
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("ballast: log lines");
  }
}

}  // namespace ballast::python
