#pragma once

#include <string_view>

namespace ballast::tools {

/// Writes `text` to a standard stream: STDOUT_FILENO, after what stdio has buffered for it, or
/// STDERR_FILENO. Never throws, since a message must not end the work that it is about. Returns 0,
/// or the error number of the system: EPIPE for a pipe whose reader has ended, EIO for a terminal
/// that was closed. After a signal (interrupted()), a stream that takes nothing for a second is
/// given up, and this and all later calls return ETIMEDOUT.
int write_output(int stream, std::string_view text);

/// Writes the line "ballast: error: MESSAGE" to standard error, if possible.
void print_error(std::string_view message);

}  // namespace ballast::tools
