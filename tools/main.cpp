#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "ballast/comm/launch.h"
#include "ballast/comm/together.h"
#include "ballast/core/error.h"
#include "ballast/core/log.h"
#include "ballast/core/suggest.h"

#include "tools/commands.h"
#include "tools/ranks.h"

namespace ballast::tools {
namespace {

std::atomic<bool>& interrupt_flag() {
  static std::atomic<bool> flag = false;
  return flag;
}

std::atomic<int>& first_signal() {
  static std::atomic<int> number = 0;
  return number;
}

extern "C" void on_signal(int number) {
  int none = 0;
  first_signal().compare_exchange_strong(none, number);
  interrupt_flag().store(true);
}

void install_signal_handlers() {
  struct sigaction action = {};
  action.sa_handler = on_signal;
  // A second signal ends the program at once.
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  // A file-size limit shows up as EFBIG, a closed pipe as EPIPE: errors like any other.
  std::signal(SIGXFSZ, SIG_IGN);
  std::signal(SIGPIPE, SIG_IGN);
}

/// Only rank 0 logs; warnings of other ranks are printed with the rank's number.
void install_log_sink(bool verbose, std::uint32_t rank) {
  set_log_sink([verbose, rank](LogLevel level, std::string_view line) {
    if (level == LogLevel::warning) {
      const std::string who = rank == 0 ? "" : fmt::format("rank {}: ", rank);
      fmt::print(stderr, "ballast: warning: {}{}\n", who, line);
    } else if (rank == 0 && (level == LogLevel::info || verbose)) {
      fmt::print(stderr, "ballast: {}\n", line);
    }
  });
}

/// Rank of this process among those of its launcher; 0 until it is known.
std::uint32_t& own_rank() {
  static std::uint32_t rank = 0;
  return rank;
}

/// Ranks that could not join have failed alike, and rank 0 prints the error. The others wait, since
/// the launcher kills rank 0 as soon as one of them exits.
int fail(const std::string& message, int status) {
  if (own_rank() == 0) {
    fmt::print(stderr, "ballast: error: {}\n", message);
  } else {
    std::this_thread::sleep_for(std::chrono::seconds(1));
  }
  return status;
}

/// A message about the first word that is not a command where one is expected; "" if there is none.
std::string unknown_command(const CLI::App& app, int argc, char** argv) {
  const CLI::App* place = &app;
  for (int i = 1; i < argc; ++i) {
    std::vector<std::string> known;
    const CLI::App* next = nullptr;
    for (const auto* command : place->get_subcommands(nullptr)) {
      known.push_back(command->get_name());
      if (command->get_name() == argv[i]) next = command;
    }
    if (known.empty()) return "";
    if (argv[i][0] == '-') continue;
    if (next == nullptr) {
      return fmt::format("'{}' is not a {} command{}", argv[i], place->get_name(),
                         did_you_mean(argv[i], known));
    }
    place = next;
  }
  return "";
}

/// One line about a wrong command line: our own message, or else CLI11's.
std::string usage_message(const CLI::ParseError& error, const CLI::App& app, int argc,
                          char** argv) {
  std::string message = unknown_command(app, argc, argv);
  if (message.empty()) message = error.what();
  std::replace(message.begin(), message.end(), '\n', ' ');
  return message + "; see ballast --help";
}

/// Fails on all ranks together.
[[noreturn]] void refuse(const std::string& message, const comm::Launch& launch) {
  const Error error(ErrorCategory::usage, message);
  if (launch.world > 1) {
    run_as_rank(launch, {}, [&error](comm::Ranks& ranks) {
      comm::together(&ranks, [&error] { throw Error(error); });
    });
  }
  throw Error(error);
}

int run(int argc, char** argv) {
  CLI::App app("Trains transformers larger than the memory they train on.", "ballast");
  app.require_subcommand(0, 1);
  bool version = false;
  bool verbose = false;
  app.add_flag("--version", version, "Print the version and what is built in");
  app.add_flag("-v,--verbose", verbose, "Log details, such as why a backend was chosen");
  Action action;
  add_train(app, action);
  add_plan(app, action);
  add_tokenize(app, action);
  add_bench(app, action);
  add_tune(app, action);
  const comm::Launch launch = comm::read_launch();
  own_rank() = launch.rank;
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& help) {
    return launch.first() ? app.exit(help) : 0;
  } catch (const CLI::ParseError& error) {
    refuse(usage_message(error, app, argc, argv), launch);
  }
  // Only training uses several ranks.
  if (!launch.first() && !app.got_subcommand("train")) return 0;
  install_log_sink(verbose, launch.rank);
  install_signal_handlers();
  if (version) {
    print_version();
    return 0;
  }
  if (!action) {
    fmt::print("{}", app.help());
    return 2;
  }
  action();
  return std::fflush(stdout) == 0 ? 0 : fail("cannot write to standard output", 1);
}

}  // namespace

const std::atomic<bool>& interrupted() {
  return interrupt_flag();
}

int interrupt_signal() {
  return first_signal().load();
}

}  // namespace ballast::tools

int main(int argc, char** argv) {
  using ballast::tools::fail;
  try {
    return ballast::tools::run(argc, argv);
  } catch (const ballast::tools::Reported& reported) {
    return reported.status;
  } catch (const ballast::Error& error) {
    return fail(error.what(), ballast::tools::status_of(error));
  } catch (const std::bad_alloc&) {
    return fail("out of memory", 1);
  } catch (const std::exception& error) {
    return fail(error.what(), 1);
  }
}
