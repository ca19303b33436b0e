#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <mpi.h>

#include "ballast/core/error.h"
#include "ballast/core/polling.h"

#include "src/comm/channel.h"
#include "src/comm/sum.h"

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

/// `value` as MPI takes counts. Throws Error(comm) when it does not fit.
int to_count(std::uint64_t value) {
  if (value > static_cast<std::uint64_t>(std::numeric_limits<int>::max())) {
    throw Error(ErrorCategory::comm, fmt::format("a collective of {} elements is more than MPI "
                                                 "takes at once",
                                                 value));
  }
  return static_cast<int>(value);
}

/// MPI in this process, from its start to its end. Thread-safe.
///
/// A collective that was given up leaves a request behind which MPI cannot cancel. From then on
/// waits in other threads end, nothing new starts and MPI is not ended, because that would wait for
/// the other ranks. The process can still end.
class MpiSession {
 public:
  /// Starts MPI; throws Error(comm) as join_ranks does. The calling thread destroys the session.
  MpiSession(const Launch& launch, std::shared_ptr<CollectiveTimeout> timeout);
  /// Ends MPI, unless a collective was given up or an exception is under way.
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  /// kPage bytes as one element: counts of it fit an int up to 8 TiB.
  [[nodiscard]] MPI_Datatype page() const { return page_; }

  /// Calls `start`, an MPI_I... call that fills a request and returns a code, and waits for the
  /// request. Throws Error(comm), which names what failed or was not answered, or
  /// Error(interrupted); all later calls throw then.
  void run(const Collective& what, const std::function<int(MPI_Request*)>& start);

  /// All ranks under a context of their own. Collective.
  MPI_Comm duplicate_world();
  /// Ranks with the same `color`, in the order of their `keys`, under a context of their own.
  /// Collective of all ranks.
  MPI_Comm split_world(int color, int key);
  /// Ends what one of these made.
  void release(MPI_Comm& communicator) const;

 private:
  void check_agreement(const Launch& launch) const;
  void wait(const Collective& what, MPI_Request& request);

  std::shared_ptr<CollectiveTimeout> timeout_;
  MPI_Datatype page_ = MPI_DATATYPE_NULL;
};

MpiSession::MpiSession(const Launch& launch, std::shared_ptr<CollectiveTimeout> timeout)
    : timeout_(std::move(timeout)) {
  start_mpi();
  check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_agreement(launch);
  check(MPI_Type_contiguous(static_cast<int>(kPage), MPI_BYTE, &page_), "MPI_Type_contiguous");
  check(MPI_Type_commit(&page_), "MPI_Type_commit");
}

MpiSession::~MpiSession() {
  if (!timeout_->ends_quietly()) return;
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
    timeout_->check(what, 0.0);
    MPI_Request request = MPI_REQUEST_NULL;
    check(start(&request), what);
    wait(what, request);
  } catch (...) {
    timeout_->give_up();
    throw;
  }
}

void MpiSession::wait(const Collective& what, MPI_Request& request) {
  Polling polling;
  while (true) {
    int done = 0;
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), what);
    if (done != 0) return;
    timeout_->check(what, polling.seconds());
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
  if (timeout_->ends_quietly()) MPI_Comm_free(&communicator);
}

/// What goes to or comes from each rank, in pages: MPI's arguments.
struct Exchange {
  explicit Exchange(std::uint32_t world) : counts(world), places(world) {}
  std::vector<int> counts;
  std::vector<int> places;
};

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(std::shared_ptr<MpiSession> session, Members members)
      : session_(std::move(session)),
        members_(std::move(members)),
        rank_(members_.place()),
        world_(members_.count()) {
    communicator_ = members_.all_in_order()
                        ? session_->duplicate_world()
                        : session_->split_world(to_count(members_.first_rank()), to_count(rank_));
  }
  ~MpiCommunicator() override { session_->release(communicator_); }

  void all_gather(device::Stream& stream, ConstDeviceBytes shard, DeviceBytes whole) override {
    check_all_gather(shard, whole, world_);
    as_host(stream).enqueue([=, this] { gather(shard, whole); });
  }
  void reduce_scatter(device::Stream& stream, DeviceBytes whole, DeviceBytes shard, DType type,
                      DeviceBytes scratch) override {
    check_reduce_scatter(whole, shard, type, scratch, world_);
    as_host(stream).enqueue(
        [=, this] { reduce("reduce_scatter", whole, shard.raw(), type, scratch); });
  }
  void all_reduce(device::Stream& stream, DeviceBytes whole, DType type,
                  DeviceBytes scratch) override {
    check_all_reduce(whole, type, scratch, world_);
    as_host(stream).enqueue([=, this] {
      const Shards shards(whole.size(), world_);
      std::byte* own = whole.raw() + shards.at(rank_, 0) * kPage;
      reduce("all_reduce", whole, own, type, scratch);
      gather_in_place(whole);
    });
  }
  void broadcast(device::Stream& stream, DeviceBytes data, std::uint32_t root) override {
    check_broadcast(data, root, world_);
    as_host(stream).enqueue([=, this] {
      session_->run({"broadcast", data.size()}, [&](MPI_Request* request) {
        return MPI_Ibcast(data.raw(), to_count(data.size() / kPage), session_->page(),
                          to_count(root), communicator_, request);
      });
    });
  }

 private:
  void gather(ConstDeviceBytes shard, DeviceBytes whole) {
    const bool in_place = shard.raw() == whole.raw() + rank_ * shard.size();
    const void* from = in_place ? MPI_IN_PLACE : shard.raw();
    const int pages = to_count(shard.size() / kPage);
    session_->run({"all_gather", whole.size()}, [&](MPI_Request* request) {
      return MPI_Iallgather(from, pages, session_->page(), whole.raw(), pages, session_->page(),
                            communicator_, request);
    });
  }

  /// Every rank's shard of `whole` from that rank: the second half of an all_reduce.
  void gather_in_place(DeviceBytes whole) {
    const Shards shards(whole.size(), world_);
    Exchange arriving(world_);
    for (std::uint32_t rank = 0; rank < world_; ++rank) {
      arriving.counts[rank] = to_count(shards.count(rank, 0, shards.longest()));
      arriving.places[rank] = to_count(shards.at(rank, 0));
    }
    session_->run({"all_reduce", whole.size()}, [&](MPI_Request* request) {
      return MPI_Iallgatherv(MPI_IN_PLACE, 0, session_->page(), whole.raw(), arriving.counts.data(),
                             arriving.places.data(), session_->page(), communicator_, request);
    });
  }

  /// `out` = the sum over ranks of this rank's shard of their `whole`. In rounds: as much of every
  /// shard as the scratch holds from all ranks is exchanged, then added up in rank order.
  void reduce(std::string_view name, DeviceBytes whole, std::byte* out, DType type,
              DeviceBytes scratch) {
    const Shards shards(whole.size(), world_);
    const std::uint64_t piece = scratch.size() / kPage / world_;
    std::vector<const std::byte*> sources(world_);
    for (std::uint64_t page = 0; page < shards.longest(); page += piece) {
      exchange({name, whole.size()}, whole, scratch, page, piece);
      for (std::uint32_t i = 0; i < world_; ++i) {
        const std::uint32_t member = members_.by_rank()[i];
        sources[i] = member == rank_ ? whole.raw() + shards.at(rank_, page) * kPage
                                     : scratch.raw() + member * piece * kPage;
      }
      const Bytes bytes = shards.count(rank_, page, piece) * kPage;
      if (bytes != 0) sum_in_order(sources, out + page * kPage, bytes, type);
    }
  }

  /// Pages [page, page + piece) of rank's shard go to it; what the others have of this rank's
  /// arrives in `scratch`, `piece` pages for each rank.
  void exchange(const Collective& what, DeviceBytes whole, DeviceBytes scratch, std::uint64_t page,
                std::uint64_t piece) {
    const Shards shards(whole.size(), world_);
    Exchange leaving(world_);
    Exchange arriving(world_);
    for (std::uint32_t rank = 0; rank < world_; ++rank) {
      if (rank == rank_) continue;  // the sum reads it where it is
      leaving.counts[rank] = to_count(shards.count(rank, page, piece));
      leaving.places[rank] = to_count(shards.at(rank, page));
      arriving.counts[rank] = to_count(shards.count(rank_, page, piece));
      arriving.places[rank] = to_count(rank * piece);
    }
    session_->run(what, [&](MPI_Request* request) {
      return MPI_Ialltoallv(whole.raw(), leaving.counts.data(), leaving.places.data(),
                            session_->page(), scratch.raw(), arriving.counts.data(),
                            arriving.places.data(), session_->page(), communicator_, request);
    });
  }

  std::shared_ptr<MpiSession> session_;
  Members members_;
  std::uint32_t rank_;   ///< this one's place among the members, which is its rank in MPI
  std::uint32_t world_;  ///< number of members
  MPI_Comm communicator_ = MPI_COMM_NULL;
};

class MpiRanks final : public Ranks {
 public:
  MpiRanks(const Launch& launch, const JoinOptions& options)
      : launch_(launch),
        timeout_(std::make_shared<CollectiveTimeout>(options)),
        session_(std::make_shared<MpiSession>(launch, timeout_)) {
    communicator_ = session_->duplicate_world();
  }
  ~MpiRanks() override { session_->release(communicator_); }

  const Launch& launch() const override { return launch_; }
  std::string_view kind() const override { return "mpi"; }

  std::unique_ptr<Communicator> make_channel(device::Device& device,
                                             std::span<const std::uint32_t> ranks) override {
    Members members(ranks, rank(), world());
    if (device.kind() == "cuda") return make_nccl_communicator(*this, members, device, timeout_);
    check_host_device(device);
    return std::make_unique<MpiCommunicator>(session_, std::move(members));
  }

  void all_gather(ConstHostBytes shard, HostBytes whole) override {
    expects(whole.size() == world() * shard.size(),
            "all_gather: the whole is not a shard per rank");
    const int count = to_count(shard.size());
    session_->run({"all_gather", whole.size()}, [&](MPI_Request* request) {
      return MPI_Iallgather(shard.data(), count, MPI_BYTE, whole.data(), count, MPI_BYTE,
                            communicator_, request);
    });
  }

  std::string broadcast(std::string text) override {
    std::uint64_t size = text.size();
    broadcast_bytes(&size, sizeof size);
    text.resize(size);
    broadcast_bytes(text.data(), size);
    return text;
  }

  void barrier() override {
    session_->run({"barrier", 0},
                  [&](MPI_Request* request) { return MPI_Ibarrier(communicator_, request); });
  }

  void abort(int status) override {
    std::fflush(nullptr);
    MPI_Abort(MPI_COMM_WORLD, status);
    std::_Exit(status);
  }

 private:
  void broadcast_bytes(void* data, Bytes bytes) {
    session_->run({"broadcast", bytes}, [&](MPI_Request* request) {
      return MPI_Ibcast(data, to_count(bytes), MPI_BYTE, 0, communicator_, request);
    });
  }

  Launch launch_;
  std::shared_ptr<CollectiveTimeout> timeout_;
  std::shared_ptr<MpiSession> session_;
  MPI_Comm communicator_ = MPI_COMM_NULL;
};

}  // namespace

std::string mpi_refusal() {
  return "";
}

std::unique_ptr<Ranks> make_mpi_ranks(const Launch& launch, const JoinOptions& options) {
  return std::make_unique<MpiRanks>(launch, options);
}

}  // namespace ballast::comm
