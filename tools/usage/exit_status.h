#pragma once

#include <array>

namespace ballast::tools {

struct ExitStatus {
  const char* number;
  const char* meaning;
};

/// Exit statuses of all commands, for the help and the manual page.
inline constexpr std::array<ExitStatus, 5> kExitStatuses = {{
    {"0", "done"},
    {"1", "the work failed, or a file that the config names cannot be used"},
    {"2",
     "wrong command line or config: a word, a key or a value; or a path on the command line that "
     "does not exist, or is a directory instead of a file or the reverse"},
    {"130, 143", "ended by SIGINT (Ctrl-C) or SIGTERM, without a checkpoint"},
    {"141", "standard output was closed by its reader (a pipe to head)"},
}};

}  // namespace ballast::tools
