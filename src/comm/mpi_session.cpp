#include "src/comm/mpi_session.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>
#include <limits>
#include <string>
#include <thread>

#include <fmt/format.h>

namespace ballast::comm {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void check(int code, std::string_view what) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text = {};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  std::string reason(text.data(), static_cast<std::size_t>(length));
  std::replace(reason.begin(), reason.end(), '\n', ' ');
  throw Error(ErrorCategory::comm, fmt::format("{}: MPI: {}", what, reason));
}

/// "Open MPI v4.1.4".
std::string library_name() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text = {};
  int length = 0;
  MPI_Get_library_version(text.data(), &length);
  const std::string_view whole(text.data(), static_cast<std::size_t>(length));
  return std::string(whole.substr(0, whole.find_first_of(",\n")));
}

void start_mpi() {
  int initialized = 0;
  check(MPI_Initialized(&initialized), "MPI_Initialized");
  if (initialized != 0) {
    throw Error(ErrorCategory::comm, "a process can join a run of several ranks only once");
  }
  int granted = MPI_THREAD_SINGLE;
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &granted), "MPI_Init_thread");
  if (granted < MPI_THREAD_MULTIPLE) {
    throw Error(ErrorCategory::comm,
                fmt::format("{} grants no MPI_THREAD_MULTIPLE, which lanes that communicate at the "
                            "same time need; use an MPI library with support for threads",
                            library_name()));
  }
}

/// "all_gather of 3.00 MiB".
std::string to_text(const Collective& what) {
  if (what.bytes == 0) return std::string(what.name);
  return fmt::format("{} of {}", what.name, format_bytes(what.bytes));
}

void check(int code, const Collective& what) {
  if (code != MPI_SUCCESS) check(code, to_text(what));
}

/// Waits between looks at a request: short at first, so that small collectives are quick, then
/// long, so that ranks that share a core do not take it from each other. MPI moves large messages
/// piece by piece inside of the looks; a look that took its time has moved something, and more will
/// come.
class Backoff {
 public:
  void pause(Clock::duration look) {
    if (look > kBusyLook) {
      looks_ = 0;
      sleep_ = kShortest;
    }
    if (looks_++ < kYields) {
      std::this_thread::yield();
      return;
    }
    std::this_thread::sleep_for(sleep_);
    sleep_ = std::min(kLongest, sleep_ + sleep_ / 4);
  }

 private:
  static constexpr int kYields = 20;
  static constexpr Clock::duration kBusyLook = std::chrono::microseconds(4);
  static constexpr Clock::duration kShortest = std::chrono::microseconds(10);
  static constexpr Clock::duration kLongest = std::chrono::milliseconds(1);
  int looks_ = 0;
  Clock::duration sleep_ = kShortest;
};

}  // namespace

int to_count(std::uint64_t value) {
  if (value > static_cast<std::uint64_t>(std::numeric_limits<int>::max())) {
    throw Error(ErrorCategory::comm, fmt::format("a collective of {} elements is more than MPI "
                                                 "takes at once",
                                                 value));
  }
  return static_cast<int>(value);
}

MpiSession::MpiSession(const Launch& launch, const JoinOptions& options)
    : options_(options), exceptions_at_start_(std::uncaught_exceptions()) {
  start_mpi();
  check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_agreement(launch);
  check(MPI_Type_contiguous(static_cast<int>(kPage), MPI_BYTE, &page_), "MPI_Type_contiguous");
  check(MPI_Type_commit(&page_), "MPI_Type_commit");
}

MpiSession::~MpiSession() {
  if (!ends_quietly()) return;
  MPI_Type_free(&page_);
  MPI_Finalize();
}

void MpiSession::check_agreement(const Launch& launch) const {
  int rank = 0;
  int world = 0;
  check(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  check(MPI_Comm_size(MPI_COMM_WORLD, &world), "MPI_Comm_size");
  if (to_count(launch.rank) == rank && to_count(launch.world) == world) return;
  throw Error(
      ErrorCategory::comm,
      fmt::format("{} says that this is rank {} of {}, but {} says {} of {}: start with the "
                  "mpirun of that library",
                  launch.launcher, launch.rank, launch.world, library_name(), rank, world));
}

bool MpiSession::ends_quietly() const {
  return !broken_ && std::uncaught_exceptions() <= exceptions_at_start_;
}

void MpiSession::run(const Collective& what, const std::function<int(MPI_Request*)>& start) {
  try {
    check_patience(what, 0.0);
    MPI_Request request = MPI_REQUEST_NULL;
    check(start(&request), what);
    wait(what, request);
  } catch (...) {
    broken_ = true;
    throw;
  }
}

void MpiSession::wait(const Collective& what, MPI_Request& request) {
  const auto start = Clock::now();
  Backoff backoff;
  while (true) {
    const auto before = Clock::now();
    int done = 0;
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), what);
    if (done != 0) return;
    check_patience(what, seconds_since(start));
    backoff.pause(Clock::now() - before);
  }
}

void MpiSession::check_patience(const Collective& what, double waited_seconds) const {
  if (options_.interrupted != nullptr && *options_.interrupted) {
    throw Error(ErrorCategory::interrupted, "interrupted in " + to_text(what));
  }
  if (broken_) {
    throw Error(ErrorCategory::comm,
                to_text(what) + ": given up, because another collective failed before");
  }
  if (waited_seconds > options_.timeout_seconds) {
    throw Error(ErrorCategory::comm,
                fmt::format("{}: not all ranks took part within {}; see what became of the others, "
                            "or raise ballast.comm_timeout_seconds",
                            to_text(what), format_seconds(options_.timeout_seconds)));
  }
}

MPI_Comm MpiSession::duplicate_world() {
  MPI_Comm duplicate = MPI_COMM_NULL;
  run({"setting up a channel", 0},
      [&](MPI_Request* request) { return MPI_Comm_idup(MPI_COMM_WORLD, &duplicate, request); });
  return duplicate;
}

/// MPI has no split that does not block; all ranks are known to be there when it begins.
MPI_Comm MpiSession::split_world(int color, int key) {
  run({"setting up a channel", 0},
      [&](MPI_Request* request) { return MPI_Ibarrier(MPI_COMM_WORLD, request); });
  MPI_Comm split = MPI_COMM_NULL;
  check(MPI_Comm_split(MPI_COMM_WORLD, color, key, &split), "MPI_Comm_split");
  return split;
}

void MpiSession::release(MPI_Comm& communicator) const {
  if (ends_quietly()) MPI_Comm_free(&communicator);
}

}  // namespace ballast::comm
