#include "tests/support/fake_nccl.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include <mpi.h>

#include "ballast/comm/communicator.h"

#include "src/comm/nccl_functions.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/fake_memory.h"
#include "tests/support/fake_stream.h"

struct ncclComm {
  MPI_Comm mpi = MPI_COMM_NULL;  ///< null in a world of 1
  std::size_t rank = 0;
  std::size_t count = 1;
  int busy_looks = 0;  ///< number of queries that return "in progress"
  int gpu = 0;
  void* memory = nullptr;  ///< on the GPU
  ncclComm() = default;
  ncclComm(const ncclComm&) = delete;
  ncclComm& operator=(const ncclComm&) = delete;
  ~ncclComm() {
    if (memory != nullptr) cudaFree(memory);
  }
};

namespace {

using ballast::test::FakeCuda;
using ballast::test::FakeNccl;

/// Starts a call of a group and returns its request.
using Start = std::function<void(MPI_Request*)>;

/// Calls of one channel that were started together.
struct Group {
  ncclComm_t channel = nullptr;
  cudaStream_t stream = nullptr;
  std::uint64_t number = 0;
  std::vector<Start> calls;
  std::vector<MPI_Request> requests;  ///< once it runs
};

thread_local bool in_group = false;
thread_local Group group;

/// The groups of a GPU of this process that have not ended.
class Gpu {
 public:
  /// With a seed, the group runs in the order of its stream.
  void enqueue(Group&& started) {
    const cudaStream_t stream = started.stream;
    std::uint64_t number = 0;
    {
      const std::scoped_lock lock(mutex_);
      number = started.number = ++enqueued_;
      groups_.push_back(std::move(started));
    }
    if (FakeCuda::seed == 0) return;
    ballast::test::on_stream_until(stream, [this, number] { return has_ended(number); });
  }
  /// Runs groups until one waits for another rank. Returns whether a group of `channel` is left.
  bool works_for(ncclComm_t channel) {
    const std::scoped_lock lock(mutex_);
    while (!groups_.empty() && is_over(groups_.front())) groups_.pop_front();
    return std::any_of(groups_.begin(), groups_.end(),
                       [&](const Group& each) { return each.channel == channel; });
  }
  /// Runs a group if all groups that were started earlier have ended. Returns whether it has ended.
  bool has_ended(std::uint64_t number) {
    const std::scoped_lock lock(mutex_);
    const auto found = std::find_if(groups_.begin(), groups_.end(),
                                    [&](const Group& each) { return each.number == number; });
    if (found == groups_.end()) return true;  // aborted
    if (found != groups_.begin() || !is_over(groups_.front())) return false;
    groups_.pop_front();
    return true;
  }
  /// Ends the groups of `channel`, whose buffers other ranks may still write.
  void abort(ncclComm_t channel) {
    const std::scoped_lock lock(mutex_);
    std::erase_if(groups_, [&](const Group& each) { return each.channel == channel; });
  }

 private:
  /// Returns whether the GPU hangs instead of beginning another group.
  static bool hangs() {
    if (FakeNccl::groups_until_hang < 0) return false;
    return FakeNccl::groups_until_hang == 0 || --FakeNccl::groups_until_hang < 0;
  }
  static bool is_over(Group& first) {
    if (!first.calls.empty() && hangs()) return false;
    for (const Start& start : std::exchange(first.calls, {})) {
      start(&first.requests.emplace_back(MPI_REQUEST_NULL));
    }
    std::erase(first.requests, MPI_REQUEST_NULL);
    if (first.requests.empty()) return true;
    int over = 0;
    MPI_Testall(static_cast<int>(first.requests.size()), first.requests.data(), &over,
                MPI_STATUSES_IGNORE);
    return over != 0;
  }

  std::mutex mutex_;
  std::deque<Group> groups_;
  std::uint64_t enqueued_ = 0;
};
Gpu& gpu_of(ncclComm_t channel) {
  static auto* const kept = new std::array<Gpu, 8>;  // channels may end after static objects
  return kept->at(static_cast<std::size_t>(channel->gpu));
}

/// Rank in MPI, 0 without it.
int world_rank() {
  int joined = 0;
  MPI_Initialized(&joined);
  int rank = 0;
  if (joined != 0) MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

/// The process that made the identifier, followed by a pattern.
char identifier_byte(int place, int maker) {
  return static_cast<char>(place == 0 ? maker : 37 * place);
}

/// Calls must be in groups of one channel and one stream, of type bytes, and not empty.
ncclResult_t grouped(ncclComm_t channel, ncclDataType_t type, std::size_t count,
                     cudaStream_t stream, Start start) {
  if (!in_group || type != ncclUint8 || count == 0) return ncclInvalidUsage;
  if (!group.calls.empty() && (group.channel != channel || group.stream != stream)) {
    return ncclInvalidUsage;
  }
  if (FakeCuda::fault != cudaSuccess) return ncclUnhandledCudaError;
  channel->busy_looks = 2;
  group.channel = channel;
  group.stream = stream;
  group.calls.push_back(std::move(start));
  return ncclInProgress;
}

/// Returns whether the GPU may access the range, if the fake is strict.
bool is_accessible(const void* start, std::size_t bytes) {
  using ballast::test::FakeMemory;
  if (FakeCuda::seed == 0 || FakeMemory::where(start, bytes) == FakeMemory::Where::inside) {
    return true;
  }
  FakeCuda::complain("NCCL: a range that is not in one allocation of the GPU");
  return false;
}

int to_int(std::size_t count) {
  return static_cast<int>(count);
}

ncclResult_t make_identifier(ncclUniqueId* id) {
  const int maker = world_rank();
  for (int i = 0; i < NCCL_UNIQUE_ID_BYTES; ++i) id->internal[i] = identifier_byte(i, maker);
  return ncclSuccess;
}

ncclResult_t join(ncclComm_t* channel, int count, ncclUniqueId id, int rank, ncclConfig_t* config) {
  const int maker = id.internal[0];
  for (int i = 0; i < NCCL_UNIQUE_ID_BYTES; ++i) {
    if (id.internal[i] != identifier_byte(i, maker)) return ncclInvalidArgument;
  }
  if (config->blocking != 0) return ncclInvalidArgument;
  void* memory = nullptr;
  const std::size_t size = FakeNccl::channel_memory;
  if (size > 0 && cudaMalloc(&memory, size) != cudaSuccess) return ncclUnhandledCudaError;
  *channel = new ncclComm;
  (*channel)->rank = static_cast<std::size_t>(rank);
  (*channel)->count = static_cast<std::size_t>(count);
  (*channel)->busy_looks = 3;
  (*channel)->gpu = FakeCuda::current();
  (*channel)->memory = memory;
  int joined = 0;
  MPI_Initialized(&joined);
  if (joined == 0) return ncclInProgress;
  // The processes with the same identifier, in the order of their ranks.
  MPI_Comm_split(MPI_COMM_WORLD, maker, rank, &(*channel)->mpi);
  int members = 0;
  MPI_Comm_size((*channel)->mpi, &members);
  return members == count ? ncclInProgress : ncclInvalidArgument;
}
ncclResult_t state(ncclComm_t channel, ncclResult_t* now) {
  *now = FakeNccl::async_error;
  if (*now != ncclSuccess) return ncclSuccess;
  // With a seed, collectives are done when their stream is.
  if (FakeCuda::seed == 0 && gpu_of(channel).works_for(channel)) {
    *now = ncclInProgress;
  } else if (channel->busy_looks > 0) {
    --channel->busy_looks;
    *now = ncclInProgress;
  }
  return ncclSuccess;
}
ncclResult_t finalize(ncclComm_t channel) {
  ++FakeNccl::finalized;
  channel->busy_looks = 2;
  return ncclInProgress;
}
ncclResult_t destroy(ncclComm_t channel) {
  ++FakeNccl::destroyed;
  if (channel->mpi != MPI_COMM_NULL) MPI_Comm_free(&channel->mpi);
  delete channel;
  return ncclSuccess;
}
ncclResult_t abort_channel(ncclComm_t channel) {
  ++FakeNccl::aborted;
  gpu_of(channel).abort(channel);
  delete channel;
  return ncclSuccess;
}
const char* error_text(ncclResult_t) {
  return "a fake's error";
}
const char* last_error(ncclComm_t) {
  return "two\nlines";
}

ncclResult_t start_group() {
  in_group = true;
  return ncclSuccess;
}
ncclResult_t end_group() {
  in_group = false;
  Group ended = std::exchange(group, {});
  if (!ended.calls.empty()) gpu_of(ended.channel).enqueue(std::move(ended));
  return ncclInProgress;
}

ncclResult_t send(const void* from, std::size_t count, ncclDataType_t type, int peer,
                  ncclComm_t channel, cudaStream_t stream) {
  if (!is_accessible(from, count)) return ncclInvalidArgument;
  return grouped(channel, type, count, stream, [=](MPI_Request* request) {
    MPI_Isend(from, to_int(count), MPI_BYTE, peer, 0, channel->mpi, request);
  });
}
ncclResult_t receive(void* to, std::size_t count, ncclDataType_t type, int peer, ncclComm_t channel,
                     cudaStream_t stream) {
  if (!is_accessible(to, count)) return ncclInvalidArgument;
  return grouped(channel, type, count, stream, [=](MPI_Request* request) {
    MPI_Irecv(to, to_int(count), MPI_BYTE, peer, 0, channel->mpi, request);
  });
}
ncclResult_t all_gather(const void* from, void* to, std::size_t count, ncclDataType_t type,
                        ncclComm_t channel, cudaStream_t stream) {
  if (!is_accessible(from, count) || !is_accessible(to, channel->count * count)) {
    return ncclInvalidArgument;
  }
  return grouped(channel, type, count, stream, [=](MPI_Request* request) {
    const bool in_place = from == static_cast<char*>(to) + channel->rank * count;
    if (channel->mpi != MPI_COMM_NULL) {
      MPI_Iallgather(in_place ? MPI_IN_PLACE : from, to_int(count), MPI_BYTE, to, to_int(count),
                     MPI_BYTE, channel->mpi, request);
    } else if (!in_place) {
      std::memcpy(to, from, count);
    }
  });
}
ncclResult_t broadcast(const void* from, void* to, std::size_t count, ncclDataType_t type, int root,
                       ncclComm_t channel, cudaStream_t stream) {
  if (from != to || !is_accessible(to, count)) return ncclInvalidArgument;
  return grouped(channel, type, count, stream, [=](MPI_Request* request) {
    if (channel->mpi == MPI_COMM_NULL) return;
    MPI_Ibcast(to, to_int(count), MPI_BYTE, root, channel->mpi, request);
  });
}

ncclResult_t version(int* number) {
  *number = NCCL_VERSION_CODE;
  return ncclSuccess;
}

}  // namespace

namespace ballast::comm {

const Nccl& nccl() {
  static const Nccl fake = {.version = version,
                            .error_text = error_text,
                            .last_error = last_error,
                            .make_identifier = make_identifier,
                            .join = join,
                            .state = state,
                            .finalize = finalize,
                            .destroy = destroy,
                            .abort = abort_channel,
                            .start_group = start_group,
                            .end_group = end_group,
                            .send = send,
                            .receive = receive,
                            .all_gather = all_gather,
                            .broadcast = broadcast};
  return fake;
}

std::string nccl_refusal() {
  return "";
}
std::string nccl_file() {
  return "";
}

}  // namespace ballast::comm
