#include "tools/process.h"

#include <csignal>
#include <utility>

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

extern "C" void on_signal(int number) {
  int none = 0;
  first_signal().compare_exchange_strong(none, number);
  interrupt_flag().store(true);
}

extern "C" void on_checkpoint_signal(int /*number*/) {
  checkpoint_flag().store(true);
}

}  // namespace

void install_signal_handlers() {
  struct sigaction action = {};
  action.sa_handler = on_signal;
  // A second signal ends the program at once.
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  action.sa_handler = on_checkpoint_signal;
  action.sa_flags = SA_RESTART;
  sigaction(SIGUSR1, &action, nullptr);
  // A file-size limit shows up as EFBIG, a closed pipe as EPIPE: errors like any other.
  std::signal(SIGXFSZ, SIG_IGN);
  std::signal(SIGPIPE, SIG_IGN);
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
