#include "tools/process.h"

#include <csignal>
#include <utility>

#include "ballast/core/error.h"

namespace ballast::tools {
namespace {

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

extern "C" void on_second_signal(int number) {
  if (auto* const restore = sudden_end().load()) restore();
  std::raise(number);  // SA_RESETHAND: ends the program
}

extern "C" void on_signal(int number) {
  int none = 0;
  const bool first = first_signal().compare_exchange_strong(none, number);
  interrupt_flag().store(true);
  struct sigaction second = {};
  second.sa_handler = on_second_signal;
  second.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(number, &second, nullptr);
  auto* const say = first_words().load();
  if (first && say != nullptr) say(number);
}

extern "C" void on_checkpoint_signal(int /*number*/) {
  checkpoint_flag().store(true);
}

struct sigaction ending_action() {
  struct sigaction action = {};
  action.sa_handler = on_signal;
  return action;
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
}

}  // namespace

void install_signal_handlers() {
  const struct sigaction ending = ending_action();
  const struct sigaction checkpoint = checkpoint_action();
  sigaction(SIGINT, &ending, nullptr);
  sigaction(SIGTERM, &ending, nullptr);
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
  sigaction(SIGUSR1, &checkpoint, &former_checkpoint_);
}

SignalScope::~SignalScope() {
  sigaction(SIGINT, &former_interrupt_, nullptr);
  sigaction(SIGTERM, &former_end_, nullptr);
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

void remember_command_line(std::vector<std::string> command) {
  words() = std::move(command);
}

const std::vector<std::string>& command_line() {
  return words();
}

}  // namespace ballast::tools
