#include "tools/program.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <new>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include "ballast/comm/agreement.h"
#include "ballast/comm/communicator.h"
#include "ballast/core/error.h"
#include "ballast/text/json.h"

#include "tools/command_line.h"
#include "tools/console/terminal.h"
#include "tools/signals.h"
#include "tools/usage/words.h"

namespace ballast::tools {

namespace {

Error as_error(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    return error;
  } catch (const std::bad_alloc&) {
    return Error(ErrorCategory::memory, "out of memory");
  } catch (const std::exception& error) {
    return Error(ErrorCategory::state, error.what());
  }
}

/// Ranks that fail together report in the order of their numbers, and the first one ends the
/// others. Ranks that wait for a lost rank do not notice it at the same time.
void wait_for_lower_ranks(std::uint32_t rank) {
  using namespace std::chrono_literals;
  // A launcher needs up to a second to end the others, and longer on a busy machine.
  const auto end = std::chrono::steady_clock::now() + 6000ms * std::min(rank, 5U);
  while (!interrupted() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(10ms);
  }
}

/// A launcher sends SIGTERM after another rank has reported an error, and SIGINT for a Ctrl-C.
[[noreturn]] void end_interrupted(std::uint32_t rank) {
  if (rank == 0 && interrupt_signal() == SIGINT) {
    print_error("interrupted");
  }
  std::_Exit(interrupt_status());  // MPI_Finalize would wait for the other ranks
}

[[noreturn]] void end_all(comm::Ranks& ranks, const Error& error) {
  wait_for_lower_ranks(ranks.rank());
  if (interrupted()) end_interrupted(ranks.rank());
  print_error(fmt::format("rank {} on {}: {}", ranks.rank(), comm::host_name(), error.what()));
  ranks.abort(status_of(error));
  std::_Exit(1);  // gcc 12 ignores [[noreturn]] of a virtual function
}

/// "mpirun (Open MPI)" is started by the word mpirun.
std::string first_word(const std::string& launcher) {
  return launcher.substr(0, launcher.find(' '));
}

}  // namespace

void report_without_ranks(std::uint32_t rank, const std::string& message) {
  wait_for_lower_ranks(rank);
  if (rank > 0 && interrupted()) return;  // by the launcher, since a lower rank has reported
  const std::string who = rank == 0 ? "" : fmt::format("rank {} on {}: ", rank, comm::host_name());
  print_error(who + message);
}

std::string launching_words(const comm::Launch& launch) {
  if (launch.world == 1) return "";
  const std::string launcher = launch.launcher.empty() ? "mpirun" : first_word(launch.launcher);
  return fmt::format("{} -n {} ", launcher, launch.world);
}

int status_of(const Error& error) {
  if (error.category() == ErrorCategory::interrupted) return interrupt_status();
  const bool usage =
      error.category() == ErrorCategory::usage || error.category() == ErrorCategory::config;
  return usage ? 2 : 1;
}

void run_as_rank(const comm::Launch& launch, const comm::JoinOptions& options,
                 const std::function<void(comm::Ranks&)>& work) {
  int status = 0;
  {
    const auto ranks = comm::join_ranks(launch, options);
    try {
      work(*ranks);
    } catch (const comm::JointError& error) {
      status = status_of(error);
      // Print before MPI_Finalize: a launcher ends all processes as soon as one has failed.
      if (launch.first()) print_error(error.what());
    } catch (...) {
      end_all(*ranks, as_error(std::current_exception()));
    }
  }
  if (status != 0) throw ReportedFailure{status};
}

namespace {

/// Only rank 0 logs; warnings of other ranks are printed with the rank's number. A note that
/// several parts of the program find is printed once. Warnings are events, which may repeat.
void install_log_sink(bool verbose, std::uint32_t rank) {
  constexpr std::size_t kRemembered = 1000;
  set_log_sink([verbose, rank, shown = std::set<std::string>()](LogLevel level,
                                                                std::string_view line) mutable {
    const bool warning = level == LogLevel::warning;
    if (!warning && (rank != 0 || (level == LogLevel::debug && !verbose))) return;
    const std::string who = warning && rank != 0 ? fmt::format("rank {}: ", rank) : "";
    const std::string text = fmt::format("ballast: {}{}{}", warning ? "warning: " : "", who,
                                         text::printable(line, line.size()));
    if (shown.size() == kRemembered) shown.clear();
    if (!warning && !shown.insert(text).second) return;
    const bool taken = take_line(text, true);
    if (taken && isatty(STDERR_FILENO) == 1) return;
    erase_live_line();
    write_output(STDERR_FILENO, text + "\n");
  });
}

/// Rank of this process among those of its launcher; 0 until it is known.
std::uint32_t& own_rank() {
  static std::uint32_t rank = 0;
  return rank;
}

/// Whether all ranks fail alike for certain, so that rank 0 alone reports it. The others wait,
/// since a launcher ends rank 0 as soon as one of them exits.
bool& fail_alike() {
  static bool alike = false;
  return alike;
}

int fail(const std::string& message, int status) {
  if (fail_alike() && own_rank() > 0) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
  } else {
    report_without_ranks(own_rank(), message);
  }
  return status;
}

/// If the reader of a pipe, such as head, has read enough, that is not worth an error message.
bool is_closed_pipe(const std::system_error& error) {
  return error.code() == std::errc::broken_pipe;
}
bool is_closed_pipe(const Error& error) {
  return error.error_number() == EPIPE;
}

/// Opens those standard streams that are closed. Otherwise a file of the run would get the number
/// of such a stream, and output would be written into it.
void open_standard_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(stream, F_GETFD) >= 0 || errno != EBADF) continue;
    // The lowest free number is that of the closed stream.
    [[maybe_unused]] const int opened = open("/dev/null", O_RDWR);
  }
}

/// Throws on all ranks together.
[[noreturn]] void refuse(const Error& error, const comm::Launch& launch) {
  if (launch.world > 1) {
    run_as_rank(launch, {}, [&error](comm::Ranks& ranks) {
      comm::collective_try(&ranks, [&error] { throw Error(error); });
    });
  }
  throw Error(error);
}

int run(int argc, char** argv, const std::vector<std::string>& name) {
  CommandLine line("ballast", "Trains transformers that are larger than the device's memory.");
  Command program = line.program();
  bool version = false;
  bool verbose = false;
  program.add_flag("-V,--version", &version, "Print the version and the compiled-in features");
  program.add_flag("-v,--verbose", &verbose, "Log details, such as why a backend was chosen");
  add_train(program);
  add_plan(program);
  add_eval(program);
  add_export(program);
  add_inspect(program);
  add_report(program);
  add_tokenize(program);
  add_bench(program);
  add_doctor(program);
  add_tune(program);
  add_help(program, line);
  add_completion(program, line);
  add_man(program, line);
  add_config_keys(program);
  const comm::Launch launch = comm::read_launch();
  own_rank() = launch.rank;
  const auto words = normalised(line.table(), {argv + std::min(argc, 1), argv + argc});
  std::vector<std::string> whole = name.empty() ? std::vector<std::string>{argv[0]} : name;
  whole.insert(whole.end(), words.begin(), words.end());
  remember_command_line(std::move(whole));
  try {
    if (!line.parse(words)) {
      if (launch.first()) fmt::print("{}", line.help());
      return 0;
    }
  } catch (const Error& error) {
    refuse(error, launch);
  }
  const auto other = comm::find_other_launcher();
  if (other && line.chosen("train")) {
    own_rank() = other->rank;
    fail_alike() = true;
  }
  // Only training uses several ranks.
  if (!launch.first() && !line.chosen("train")) return 0;
  install_log_sink(verbose, launch.rank);
  install_signal_handlers();
  // A launcher sends signals to its ranks after the failure of one of them, too.
  if (launch.launcher.empty()) announce_ending("the command ends before it is done");
  if (version) {
    print_version();
    return 0;
  }
  if (!line.action()) {
    fmt::print("{}", line.help());
    return 2;
  }
  line.action()();
  if (std::fflush(stdout) == 0) return 0;
  return errno == EPIPE ? kClosedPipe : fail("cannot write to standard output", 1);
}

}  // namespace

int main_program(int argc, char** argv, const std::vector<std::string>& name) {
  open_standard_streams();
  try {
    return run(argc, argv, name);
  } catch (const ReportedFailure& reported) {
    return reported.status;
  } catch (const Error& error) {
    return is_closed_pipe(error) ? kClosedPipe : fail(error.what(), status_of(error));
  } catch (const std::bad_alloc&) {
    return fail("out of memory", 1);
  } catch (const std::filesystem::filesystem_error& error) {
    std::error_code gone;
    static_cast<void>(std::filesystem::current_path(gone));
    return fail(gone ? "the working directory does not exist any more; change to another one"
                     : text::printable(error.what(), 4096),
                1);
  } catch (const std::system_error& error) {
    return is_closed_pipe(error) ? kClosedPipe : fail(error.what(), 1);
  } catch (const std::exception& error) {
    return fail(error.what(), 1);
  }
}

}  // namespace ballast::tools
