#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/threads.h"

#include "src/comm/channel.h"
#include "src/comm/mpi_loading.h"
#include "src/comm/sum.h"

namespace ballast::comm {
namespace {

/// Returns the calls of the module, which join_ranks() must have loaded.
const MpiTable& mpi() {
  return *loaded_mpi().calls;
}

void check(int code, std::string_view what) {
  if (code == 0) return;
  std::array<char, 1024> text = {};
  mpi().describe_error(code, text.data(), text.size());
  std::string reason = text.data();
  std::replace(reason.begin(), reason.end(), '\n', ' ');
  throw Error(ErrorCategory::comm, fmt::format("{}: MPI: {}", what, reason));
}

/// Returns "Open MPI v4.1.4".
std::string library_name() {
  std::array<char, 1024> text = {};
  mpi().describe_library(text.data(), text.size());
  const std::string_view whole = text.data();
  return std::string(whole.substr(0, whole.find_first_of(",\n")));
}

void start_mpi() {
  int started = 0;
  check(mpi().started(&started), "MPI_Initialized");
  if (started != 0) {
    throw Error(ErrorCategory::comm, "a process can join a run of several ranks only once");
  }
  int threads = 0;
  check(mpi().start(&threads), "starting MPI");
  if (threads == 0) {
    throw Error(
        ErrorCategory::comm,
        fmt::format("{} does not grant MPI_THREAD_MULTIPLE, which concurrent lanes need; use "
                    "an MPI library with thread support",
                    library_name()));
  }
}

void check(int code, const Collective& what) {
  if (code != 0) check(code, to_text(what));
}

/// Returns `value` as an MPI count. Throws Error(comm) if it does not fit.
int to_count(std::uint64_t value) {
  if (value > static_cast<std::uint64_t>(std::numeric_limits<int>::max())) {
    throw Error(ErrorCategory::comm, fmt::format("a collective of {} elements exceeds MPI's limit "
                                                 "of 2^31 - 1",
                                                 value));
  }
  return static_cast<int>(value);
}

/// Owns MPI in this process, from MPI_Init to MPI_Finalize. Thread-safe.
///
/// A failed collective leaves a request that MPI cannot cancel. From then on, waits in other
/// threads end, no new collective starts, and MPI is not finalized, because that would wait for the
/// other ranks. The process can still exit.
class MpiSession {
 public:
  /// Starts MPI; throws Error(comm) as join_ranks does. The calling thread destroys the session.
  MpiSession(const Launch& launch, std::shared_ptr<CollectiveTimeout> timeout)
      : timeout_(std::move(timeout)) {
    start_mpi();
    check_agreement(launch);
  }
  ~MpiSession() {
    if (timeout_->ends_quietly()) mpi().finish();
  }
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  using Start = std::function<int(MpiHandle*)>;

  /// Calls `start`, a nonblocking MPI call, and waits for its request. Throws Error(comm) or
  /// Error(interrupted); then all later calls throw.
  void run(const Collective& what, const Start& start) { run_all(what, {&start, 1}); }
  /// Does so for several calls at the same time.
  void run_all(const Collective& what, std::span<const Start> starts) {
    try {
      timeout_->check(what, 0.0);
      std::vector<MpiHandle> requests(starts.size());
      for (std::size_t i = 0; i < starts.size(); ++i) check(starts[i](&requests[i]), what);
      for (MpiHandle& request : requests) wait(what, request);
    } catch (...) {
      timeout_->give_up();
      throw;
    }
  }

  /// Makes a communicator of all ranks. Collective. The caller releases it.
  MpiHandle duplicate_world() {
    MpiHandle duplicate;
    run({"setting up a channel", 0},
        [&](MpiHandle* request) { return mpi().duplicate_world(&duplicate, request); });
    return duplicate;
  }
  /// Makes a communicator of the ranks with the same `color`, ordered by `key`. Collective over all
  /// ranks. The caller releases it. MPI has no nonblocking split, so a barrier comes first.
  MpiHandle split_world(int color, int key) {
    run({"setting up a channel", 0},
        [](MpiHandle* request) { return mpi().world_barrier(request); });
    MpiHandle split;
    check(mpi().split_world(color, key, &split), "MPI_Comm_split");
    return split;
  }
  void release(MpiHandle& communicator) const {
    if (timeout_->ends_quietly()) mpi().release(&communicator);
  }

 private:
  static void check_agreement(const Launch& launch) {
    int rank = 0;
    int world = 0;
    check(mpi().place(&rank, &world), "MPI_Comm_rank");
    if (to_count(launch.rank) == rank && to_count(launch.world) == world) return;
    throw Error(
        ErrorCategory::comm,
        fmt::format("{} reports rank {} of {}, but {} reports rank {} of {}; start with the mpirun "
                    "of that library{}",
                    launch.launcher, launch.rank, launch.world, library_name(), rank, world,
                    launch.launcher == "srun" ? ", or with a --mpi of srun that it supports "
                                                "(`srun --mpi=list`)"
                                              : ""));
  }

  void wait(const Collective& what, MpiHandle& request) {
    Polling polling(Polling::Worker::polls);
    while (true) {
      int done = 0;
      check(mpi().test(&request, &done), what);
      if (done != 0) return;
      timeout_->check(what, polling.seconds());
      polling.pause();
    }
  }

  std::shared_ptr<CollectiveTimeout> timeout_;
};

/// Arguments of an exchange: counts and offsets per rank, in pages.
struct Exchange {
  explicit Exchange(std::uint32_t world) : counts(world), places(world) {}
  std::vector<int> counts;
  std::vector<int> places;
};

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(std::shared_ptr<MpiSession> session, Members members, Bytes largest_message)
      : session_(std::move(session)),
        members_(std::move(members)),
        largest_message_(largest_message),
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
    check_reduce_scatter(whole, shard, scratch, world_);
    as_host(stream).enqueue(
        [=, this] { reduce("reduce_scatter", whole, shard.raw(), type, scratch); });
  }
  void all_reduce(device::Stream& stream, DeviceBytes whole, DType type,
                  DeviceBytes scratch) override {
    check_all_reduce(whole, scratch, world_);
    as_host(stream).enqueue([=, this] {
      const Shards shards(whole.size(), world_);
      std::byte* own = whole.raw() + shards.at(rank_, 0) * kPage;
      reduce("all_reduce", whole, own, type, scratch);
      gather_in_place(whole);
    });
  }
  void all_to_all(device::Stream& stream, ConstDeviceBytes input,
                  std::span<const Bytes> input_parts, DeviceBytes output,
                  std::span<const Bytes> output_parts) override {
    check_all_to_all(input, input_parts, output, output_parts, world_);
    as_host(stream).enqueue(
        [=, this, sent = parts_of(input, input_parts), received = parts_of(output, output_parts)] {
          exchange_parts({"all_to_all", output.size()}, sent, received);
        });
  }
  void sum_terms(device::Stream& stream, const OrderedSum& sum, ConstDeviceBytes terms,
                 ConstDeviceBytes first, DeviceBytes out, DeviceBytes scratch) override {
    check_sum_terms(sum, terms, first, out, scratch, world_);
    as_host(stream).enqueue([=, this] {
      exchange_terms(sum, terms, scratch);
      add_own_part(sum, world_, rank_, terms, first, out, scratch);
      gather_parts_of_sum(sum, out);
    });
  }
  void broadcast(device::Stream& stream, DeviceBytes data, std::uint32_t root) override {
    check_broadcast(data, root, world_);
    as_host(stream).enqueue([=, this] {
      session_->run({"broadcast", data.size()}, [&](MpiHandle* request) {
        return mpi().broadcast(&communicator_, data.raw(), to_count(data.size() / kPage),
                               MpiUnit::page, to_count(root), request);
      });
    });
  }

 private:
  /// Returns consecutive parts of `whole`.
  template <class T>
  static std::vector<DeviceView<T>> parts_of(DeviceView<T> whole, std::span<const Bytes> sizes) {
    std::vector<DeviceView<T>> parts;
    Bytes end = 0;
    for (const Bytes bytes : sizes) {
      parts.push_back(whole.subview(end, bytes));
      end += bytes;
    }
    return parts;
  }

  /// Sends part p of `sent` to member p and receives part p of `received`, in turns with one member
  /// to send to and one to receive from, and in pieces. Only the two members of a part need to know
  /// its size, which is not limited by the counts of MPI.
  void exchange_parts(const Collective& what, const std::vector<ConstDeviceBytes>& sent,
                      const std::vector<DeviceBytes>& received) {
    const ConstDeviceBytes own = sent[rank_];
    if (!own.empty()) std::memcpy(received[rank_].raw(), own.raw(), own.size());
    for (std::uint32_t turn = 1; turn < world_; ++turn) {
      const std::uint32_t to = (rank_ + turn) % world_;
      const std::uint32_t from = (rank_ + world_ - turn) % world_;
      const Bytes most = std::max(sent[to].size(), received[from].size());
      for (Bytes done = 0; done < most; done += largest_message_) {
        std::vector<MpiSession::Start> starts;
        if (done < received[from].size()) {
          starts.emplace_back([&](MpiHandle* request) {
            return mpi().receive(&communicator_, received[from].raw() + done,
                                 piece_of(received[from].size(), done), to_count(from), request);
          });
        }
        if (done < sent[to].size()) {
          starts.emplace_back([&](MpiHandle* request) {
            return mpi().send(&communicator_, sent[to].raw() + done,
                              piece_of(sent[to].size(), done), to_count(to), request);
          });
        }
        session_->run_all(what, starts);
      }
    }
  }
  [[nodiscard]] int piece_of(Bytes size, Bytes done) const {
    return to_count(std::min(largest_message_, size - done));
  }

  /// Sends each member its part of this member's terms.
  void exchange_terms(const OrderedSum& sum, ConstDeviceBytes terms, DeviceBytes scratch) {
    const Bytes width = size_of(sum.term_type);
    const SumParts parts(sum.elements, world_);
    for (std::uint32_t number = 0; number < sum.terms; ++number) {
      const ConstDeviceBytes term =
          terms.subview(number * sum.elements * width, sum.elements * width);
      std::vector<ConstDeviceBytes> sent(world_);
      std::vector<DeviceBytes> received(world_);
      for (std::uint32_t member = 0; member < world_; ++member) {
        if (member == rank_) continue;  // the sum reads it in place
        sent[member] = parts.of(term, member, width);
        received[member] = scratch.subview(parts.received_at(member, number, sum.terms) * width,
                                           parts.count(rank_) * width);
      }
      exchange_parts({"sum_terms", terms.size()}, sent, received);
    }
  }

  void gather_parts_of_sum(const OrderedSum& sum, DeviceBytes out) {
    const Bytes width = size_of(sum.type);
    const SumParts parts(sum.elements, world_);
    std::vector<ConstDeviceBytes> sent(world_);
    std::vector<DeviceBytes> received(world_);
    for (std::uint32_t member = 0; member < world_; ++member) {
      if (member == rank_) continue;
      sent[member] = parts.of(out, rank_, width);
      received[member] = parts.of(out, member, width);
    }
    exchange_parts({"sum_terms", out.size()}, sent, received);
  }

  void gather(ConstDeviceBytes shard, DeviceBytes whole) {
    const bool in_place = shard.raw() == whole.raw() + rank_ * shard.size();
    const void* from = in_place ? nullptr : shard.raw();
    const int pages = to_count(shard.size() / kPage);
    session_->run({"all_gather", whole.size()}, [&](MpiHandle* request) {
      return mpi().all_gather(&communicator_, from, whole.raw(), pages, MpiUnit::page, request);
    });
  }

  /// Gathers every rank's shard of `whole`: the second half of an all_reduce.
  void gather_in_place(DeviceBytes whole) {
    const Shards shards(whole.size(), world_);
    Exchange received(world_);
    for (std::uint32_t rank = 0; rank < world_; ++rank) {
      received.counts[rank] = to_count(shards.count(rank, 0, shards.longest()));
      received.places[rank] = to_count(shards.at(rank, 0));
    }
    session_->run({"all_reduce", whole.size()}, [&](MpiHandle* request) {
      return mpi().all_gather_parts(&communicator_, whole.raw(), received.counts.data(),
                                    received.places.data(), request);
    });
  }

  /// `out` = the sum over ranks of this rank's shard in their `whole`. Each round exchanges the
  /// pages of every shard that fit in `scratch` for all ranks, then adds them in rank order.
  void reduce(std::string_view name, DeviceBytes whole, std::byte* out, DType type,
              DeviceBytes scratch) {
    const Shards shards(whole.size(), world_);
    const std::uint64_t piece = scratch.size() / kPage / world_;
    std::vector<const std::byte*> sources(world_);
    for (std::uint64_t page = 0; page < shards.longest(); page += piece) {
      exchange_shards({name, whole.size()}, whole, scratch, page, piece);
      for (std::uint32_t i = 0; i < world_; ++i) {
        const std::uint32_t member = members_.by_rank()[i];
        sources[i] = member == rank_ ? whole.raw() + shards.at(rank_, page) * kPage
                                     : scratch.raw() + member * piece * kPage;
      }
      const Bytes bytes = shards.count(rank_, page, piece) * kPage;
      if (bytes != 0) sum_in_order(sources, out + page * kPage, bytes, type);
    }
  }

  /// Sends pages [page, page + piece) of each rank's shard to that rank. `scratch` receives the
  /// others' pages of this rank's shard, `piece` pages per rank.
  void exchange_shards(const Collective& what, DeviceBytes whole, DeviceBytes scratch,
                       std::uint64_t page, std::uint64_t piece) {
    const Shards shards(whole.size(), world_);
    Exchange sent(world_);
    Exchange received(world_);
    for (std::uint32_t rank = 0; rank < world_; ++rank) {
      if (rank == rank_) continue;  // the sum reads it in place
      sent.counts[rank] = to_count(shards.count(rank, page, piece));
      sent.places[rank] = to_count(shards.at(rank, page));
      received.counts[rank] = to_count(shards.count(rank_, page, piece));
      received.places[rank] = to_count(rank * piece);
    }
    session_->run(what, [&](MpiHandle* request) {
      return mpi().exchange(&communicator_, whole.raw(), sent.counts.data(), sent.places.data(),
                            scratch.raw(), received.counts.data(), received.places.data(), request);
    });
  }

  std::shared_ptr<MpiSession> session_;
  Members members_;
  Bytes largest_message_;  ///< JoinOptions::largest_message
  std::uint32_t rank_;     ///< place among the members; rank in the MPI communicator
  std::uint32_t world_;    ///< number of members
  MpiHandle communicator_;
};

class MpiRanks final : public Ranks {
 public:
  MpiRanks(const Launch& launch, const JoinOptions& options)
      : launch_(launch),
        largest_message_(options.largest_message),
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
    return std::make_unique<MpiCommunicator>(session_, std::move(members), largest_message_);
  }

  void all_gather(ConstHostBytes shard, HostBytes whole) override {
    expects(whole.size() == world() * shard.size(),
            "all_gather: `whole` must hold one shard per rank");
    const int count = to_count(shard.size());
    session_->run({"all_gather", whole.size()}, [&](MpiHandle* request) {
      return mpi().all_gather(&communicator_, shard.data(), whole.data(), count, MpiUnit::byte,
                              request);
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
                  [&](MpiHandle* request) { return mpi().barrier(&communicator_, request); });
  }

  void leave() override { timeout_->give_up(); }

  void abort(int status) override {
    std::fflush(nullptr);
    mpi().abort(status);
    std::_Exit(status);
  }

 private:
  void broadcast_bytes(void* data, Bytes bytes) {
    session_->run({"broadcast", bytes}, [&](MpiHandle* request) {
      return mpi().broadcast(&communicator_, data, to_count(bytes), MpiUnit::byte, 0, request);
    });
  }

  Launch launch_;
  Bytes largest_message_;
  std::shared_ptr<CollectiveTimeout> timeout_;
  std::shared_ptr<MpiSession> session_;
  MpiHandle communicator_;
};

}  // namespace

std::unique_ptr<Ranks> make_mpi_ranks(const Launch& launch, const JoinOptions& options) {
  return std::make_unique<MpiRanks>(launch, options);
}

}  // namespace ballast::comm
