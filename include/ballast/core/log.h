#pragma once

#include <functional>
#include <string_view>

namespace ballast {

enum class LogLevel { debug, info, warning };

/// Receives every log line of the libraries, which never print themselves.
using LogSink = std::function<void(LogLevel, std::string_view)>;

/// Installs `sink` for the process and returns the former one (thread-safe; an empty sink drops all
/// lines, the default).
LogSink set_log_sink(LogSink sink);

/// Passes one line, without newline, to the sink. Thread-safe.
void log(LogLevel level, std::string_view line);

}  // namespace ballast
