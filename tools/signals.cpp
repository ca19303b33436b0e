#include "tools/signals.h"

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <utility>

#include <unistd.h>

#include "ballast/core/error.h"

namespace ballast::tools {
namespace {

/// A shell reports 128 plus its number for a program ended by a signal.
constexpr int kSignals = 128;

std::atomic<bool>& interrupt_flag() {
  static std::atomic<bool> flag = false;
  return flag;
}

std::atomic<bool>& checkpoint_flag() {
  static std::atomic<bool> flag = false;
  return flag;
}

std::atomic<int>& first_signal() {
  static std::atomic<int> number = 0;
  return number;
}

/// Time of the first signal in nanoseconds of the monotonic clock; 0: none has arrived.
std::atomic<std::int64_t>& first_time() {
  static std::atomic<std::int64_t> time = 0;
  return time;
}

/// Exit status that replaces that of the signal; 0: none does.
std::atomic<int>& other_status() {
  static std::atomic<int> status = 0;
  return status;
}

std::vector<std::string>& words() {
  static std::vector<std::string> all;
  return all;
}

std::atomic<void (*)()>& sudden_end() {
  static std::atomic<void (*)()> restore = nullptr;
  return restore;
}

std::atomic<void (*)(int)>& first_words() {
  static std::atomic<void (*)(int)> say = nullptr;
  return say;
}

/// Safe in a signal handler.
std::int64_t monotonic_time() {
  constexpr std::int64_t kPerSecond = 1'000'000'000;
  timespec time = {};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * kPerSecond + time.tv_nsec;
}

void end_at_once(int number) {
  if (auto* const restore = sudden_end().load()) restore();
  struct sigaction standard = {};
  standard.sa_handler = SIG_DFL;
  sigaction(number, &standard, nullptr);
  if (getpid() == 1) _exit(kSignals + number);  // has no default actions: in a container
  std::raise(number);                           // takes effect when the handler returns
}

extern "C" void on_signal(int number) {
  const int error_number = errno;
  const std::int64_t now = monotonic_time();
  std::int64_t first = 0;
  if (first_time().compare_exchange_strong(first, now)) {
    first_signal().store(number);
    interrupt_flag().store(true);
    if (auto* const say = first_words().load()) say(number);
  } else if (now - first >= kSignalGrace.count()) {
    end_at_once(number);
  }
  errno = error_number;
}

extern "C" void on_checkpoint_signal(int /*number*/) {
  checkpoint_flag().store(true);
}

struct sigaction ending_action() {
  struct sigaction action = {};
  action.sa_handler = on_signal;
  return action;
}

/// Whether the parent process has chosen to ignore a signal, as nohup does with SIGHUP.
bool is_ignored(int number) {
  struct sigaction present = {};
  return sigaction(number, nullptr, &present) == 0 && present.sa_handler == SIG_IGN;
}

struct sigaction checkpoint_action() {
  struct sigaction action = {};
  action.sa_handler = on_checkpoint_signal;
  action.sa_flags = SA_RESTART;
  return action;
}

std::atomic<bool>& scope_exists() {
  static std::atomic<bool> exists = false;
  return exists;
}

void forget_signals() {
  interrupt_flag().store(false);
  checkpoint_flag().store(false);
  first_signal().store(0);
  first_time().store(0);
}

}  // namespace

void install_signal_handlers() {
  const struct sigaction ending = ending_action();
  const struct sigaction checkpoint = checkpoint_action();
  sigaction(SIGINT, &ending, nullptr);
  sigaction(SIGTERM, &ending, nullptr);
  if (!is_ignored(SIGHUP)) sigaction(SIGHUP, &ending, nullptr);
  sigaction(SIGUSR1, &checkpoint, nullptr);
  // Turns a file-size limit into EFBIG and a closed pipe into EPIPE, errors like any other.
  std::signal(SIGXFSZ, SIG_IGN);
  std::signal(SIGPIPE, SIG_IGN);
}

void at_sudden_end(void (*restore)()) {
  sudden_end().store(restore);
}

void at_first_signal(void (*say)(int)) {
  first_words().store(say);
}

void interrupt() {
  interrupt_flag().store(true);
}

SignalScope::SignalScope() {
  if (scope_exists().exchange(true)) {
    throw Error(
        ErrorCategory::usage,
        "another run or measurement of Ballast is in progress in this process; wait for its "
        "end");
  }
  forget_signals();
  const struct sigaction ending = ending_action();
  const struct sigaction checkpoint = checkpoint_action();
  sigaction(SIGINT, &ending, &former_interrupt_);
  sigaction(SIGTERM, &ending, &former_end_);
  sigaction(SIGHUP, is_ignored(SIGHUP) ? nullptr : &ending, &former_hangup_);
  sigaction(SIGUSR1, &checkpoint, &former_checkpoint_);
}

SignalScope::~SignalScope() {
  sigaction(SIGINT, &former_interrupt_, nullptr);
  sigaction(SIGTERM, &former_end_, nullptr);
  sigaction(SIGHUP, &former_hangup_, nullptr);
  sigaction(SIGUSR1, &former_checkpoint_, nullptr);
  const int signal = interrupt_signal();
  forget_signals();
  scope_exists().store(false);
  if (signal != 0) std::raise(signal);
}

const std::atomic<bool>& interrupted() {
  return interrupt_flag();
}

std::atomic<bool>& checkpoint_wanted() {
  return checkpoint_flag();
}

int interrupt_signal() {
  return first_signal().load();
}

int interrupt_status() {
  if (const int status = other_status().load(); status != 0) return status;
  const int signal = interrupt_signal();
  return signal == 0 ? kClosedPipe : kSignals + signal;
}

void set_interrupt_status(int status) {
  other_status().store(status);
}

void remember_command_line(std::vector<std::string> command) {
  words() = std::move(command);
}

const std::vector<std::string>& command_line() {
  return words();
}

}  // namespace ballast::tools
