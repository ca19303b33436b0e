#pragma once

#include <array>

namespace ballast::tools {

/// EX_TEMPFAIL of sysexits.h, which schedulers and mail systems read as "try again".
inline constexpr int kResumable = 75;
/// Status that a shell reports for a program ended by SIGPIPE.
inline constexpr int kClosedPipe = 141;

struct ExitStatus {
  const char* number;
  const char* meaning;
};

/// Exit statuses of all commands, for the help and the manual page.
inline constexpr std::array<ExitStatus, 6> kExitStatuses = {{
    {"0", "done"},
    {"1", "the work failed, or a file that the config names cannot be used"},
    {"2",
     "wrong command line or config: a word, a key or a value; or a path on the command line that "
     "does not exist, or is a directory instead of a file or the reverse"},
    {"75",
     "training was ended before its last step, with a checkpoint from which --resume continues"},
    {"129, 130, 143", "ended by SIGHUP, SIGINT (Ctrl-C) or SIGTERM, without such a checkpoint"},
    {"141", "standard output was closed by its reader (a pipe to head)"},
}};

}  // namespace ballast::tools
