#include "tools/program.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include "ballast/comm/collective_try.h"
#include "ballast/comm/launch.h"
#include "ballast/core/error.h"
#include "ballast/core/log.h"
#include "ballast/text/json.h"

#include "tools/command_line.h"
#include "tools/commands.h"
#include "tools/console/ending_notice.h"
#include "tools/console/output.h"
#include "tools/console/terminal.h"
#include "tools/process.h"
#include "tools/ranks.h"
#include "tools/usage/exit_status.h"
#include "tools/usage/words.h"

namespace ballast::tools {
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
  } catch (const Reported& reported) {
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
