#pragma once

#include <atomic>
#include <csignal>
#include <string>
#include <vector>

namespace ballast::tools {

/// Makes SIGINT and SIGTERM set interrupted(). A second one ends the program at once. File-size
/// limits and closed pipes become errors of the write.
void install_signal_handlers();

/// Whether SIGINT or SIGTERM has arrived.
const std::atomic<bool>& interrupted();
/// Whether SIGUSR1 has arrived.
std::atomic<bool>& checkpoint_wanted();
/// The first of these signals that has arrived; 0 if none has.
int interrupt_signal();

/// Sets a function that runs before a second of these signals ends the program (nullptr: none). It
/// must be safe in a signal handler.
void at_sudden_end(void (*restore)());

/// Sets a function that runs when the first of these signals arrives, with its number (nullptr:
/// none). It must be safe in a signal handler.
void at_first_signal(void (*say)(int));

/// Makes interrupted() true, as a signal does.
void interrupt();

/// Handles SIGINT, SIGTERM and SIGUSR1 like install_signal_handlers() during its lifetime, for work
/// inside another program. Its destructor restores the former handlers and passes them the signal
/// that interrupted the work, if any. One at a time per process, since all share interrupted():
/// throws Error(usage) for a second.
class SignalScope {
 public:
  SignalScope();
  ~SignalScope();
  SignalScope(const SignalScope&) = delete;
  SignalScope& operator=(const SignalScope&) = delete;

 private:
  struct sigaction former_interrupt_ = {};
  struct sigaction former_end_ = {};
  struct sigaction former_checkpoint_ = {};
};

/// Keeps the words of the program's command line for command_line(). Call once, at the start.
void remember_command_line(std::vector<std::string> words);
/// The words of the program's command line, its name included.
const std::vector<std::string>& command_line();

}  // namespace ballast::tools
