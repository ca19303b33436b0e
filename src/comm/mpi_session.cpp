#include "src/comm/mpi_session.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/polling.h"

namespace ballast::comm {
namespace {

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

void check(int code, const Collective& what) {
  if (code != MPI_SUCCESS) check(code, to_text(what));
}

}  // namespace

int to_count(std::uint64_t value) {
  if (value > static_cast<std::uint64_t>(std::numeric_limits<int>::max())) {
    throw Error(ErrorCategory::comm, fmt::format("a collective of {} elements is more than MPI "
                                                 "takes at once",
                                                 value));
  }
  return static_cast<int>(value);
}

MpiSession::MpiSession(const Launch& launch, std::shared_ptr<Patience> patience)
    : patience_(std::move(patience)) {
  start_mpi();
  check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_agreement(launch);
  check(MPI_Type_contiguous(static_cast<int>(kPage), MPI_BYTE, &page_), "MPI_Type_contiguous");
  check(MPI_Type_commit(&page_), "MPI_Type_commit");
}

MpiSession::~MpiSession() {
  if (!patience_->ends_quietly()) return;
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

void MpiSession::run(const Collective& what, const std::function<int(MPI_Request*)>& start) {
  try {
    patience_->check(what, 0.0);
    MPI_Request request = MPI_REQUEST_NULL;
    check(start(&request), what);
    wait(what, request);
  } catch (...) {
    patience_->give_up();
    throw;
  }
}

void MpiSession::wait(const Collective& what, MPI_Request& request) {
  Polling polling;
  while (true) {
    int done = 0;
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), what);
    if (done != 0) return;
    patience_->check(what, polling.seconds());
    polling.pause();
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
  if (patience_->ends_quietly()) MPI_Comm_free(&communicator);
}

}  // namespace ballast::comm
