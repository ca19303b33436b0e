#include "tools/ranks.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <new>
#include <thread>

#include <fmt/format.h>

#include "ballast/comm/collective_try.h"

#include "tools/console/output.h"
#include "tools/process.h"

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
  if (status != 0) throw Reported{status};
}

}  // namespace ballast::tools
