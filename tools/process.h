#pragma once

#include <atomic>
#include <csignal>
#include <string>
#include <vector>

namespace ballast::tools {

/// Makes SIGINT and SIGTERM set interrupted(); a second one ends the program at once. File-size
/// limits and closed pipes become errors of the write.
void install_signal_handlers();

/// Set by SIGINT and SIGTERM.
const std::atomic<bool>& interrupted();
/// Set by SIGUSR1.
std::atomic<bool>& checkpoint_wanted();
/// The first of these signals; 0 before any.
int interrupt_signal();

/// `restore` (nullptr: nothing) runs before a second of these signals ends the program. It must be
/// safe in a signal handler.
void at_sudden_end(void (*restore)());

/// `say` (nullptr: nothing) runs when the first of these signals arrives, with its number. It must
/// be safe in a signal handler.
void at_first_signal(void (*say)(int));

/// Makes interrupted() true, as a signal does.
void interrupt();

/// Handles SIGINT, SIGTERM and SIGUSR1 like install_signal_handlers() while it lives, for work
/// inside another program. Then the former handlers get them back, and a signal that has
/// interrupted the work. One at a time in a process, since all share interrupted(): throws
/// Error(usage) for a second.
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
