#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <string>
#include <vector>

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

/// Time after the first signal in which further ones have no effect. timeout(1), launchers and
/// managers of control groups signal twice within microseconds.
inline constexpr std::chrono::nanoseconds kSignalGrace = std::chrono::seconds(2);

/// Makes SIGINT, SIGTERM and SIGHUP set interrupted(). A signal that arrives kSignalGrace or more
/// after the first one ends the program at once. A SIGHUP that is ignored (nohup) stays ignored.
/// File-size limits and closed pipes become errors of the write.
void install_signal_handlers();

/// Whether SIGINT, SIGTERM or SIGHUP has arrived, or interrupt() was called.
const std::atomic<bool>& interrupted();
/// Whether SIGUSR1 has arrived.
std::atomic<bool>& checkpoint_wanted();
/// The first of these signals that has arrived; 0 if none has.
int interrupt_signal();
/// Exit status of an interrupted program: 128 plus the number of the signal, as a shell reports it,
/// or the status of a closed pipe if there was no signal. See set_interrupt_status().
int interrupt_status();
/// Sets another exit status for an interrupted program.
void set_interrupt_status(int status);

/// Sets a function that runs before a later signal ends the program at once (nullptr: none). It
/// must be safe in a signal handler.
void at_sudden_end(void (*restore)());

/// Sets a function that runs when the first of these signals arrives, with its number (nullptr:
/// none). It must be safe in a signal handler.
void at_first_signal(void (*say)(int));

/// Makes interrupted() true, as a signal does: the caller of a run or the reader of its output has
/// ended it.
void interrupt();

/// Handles SIGINT, SIGTERM, SIGHUP and SIGUSR1 like install_signal_handlers() during its lifetime,
/// for work inside another program. Its destructor restores the former handlers and passes them the
/// signal that interrupted the work, if any. One at a time per process, since all share
/// interrupted(): throws Error(usage) for a second.
class SignalScope {
 public:
  SignalScope();
  ~SignalScope();
  SignalScope(const SignalScope&) = delete;
  SignalScope& operator=(const SignalScope&) = delete;

 private:
  struct sigaction former_interrupt_ = {};
  struct sigaction former_end_ = {};
  struct sigaction former_hangup_ = {};
  struct sigaction former_checkpoint_ = {};
};

/// Keeps the words of the program's command line for command_line(). Call once, at the start.
void remember_command_line(std::vector<std::string> words);
/// The words of the program's command line, its name included.
const std::vector<std::string>& command_line();

}  // namespace ballast::tools
