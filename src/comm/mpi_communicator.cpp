#include "src/comm/mpi_communicator.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "src/comm/host_work.h"
#include "src/comm/sum.h"

namespace ballast::comm {
namespace {

/// A buffer cut into one part per rank, in pages. Parts are equal but for the last ones, which may
/// be shorter or empty.
class Parts {
 public:
  Parts(Bytes bytes, std::uint32_t world)
      : pages_(bytes / kPage), longest_((pages_ + world - 1) / world) {}

  [[nodiscard]] std::uint64_t longest() const { return longest_; }
  /// Where page `page` of rank's part is, from the beginning of the buffer.
  [[nodiscard]] std::uint64_t at(std::uint32_t rank, std::uint64_t page) const {
    return std::min(rank * longest_ + page, pages_);
  }
  /// How many of the pages [page, page + count) of rank's part there are.
  [[nodiscard]] std::uint64_t count(std::uint32_t rank, std::uint64_t page,
                                    std::uint64_t count) const {
    return at(rank, std::min(page + count, longest_)) - at(rank, page);
  }

 private:
  std::uint64_t pages_;
  std::uint64_t longest_;
};

/// What goes to or comes from each rank, in pages: MPI's arguments.
struct Exchange {
  explicit Exchange(std::uint32_t world) : counts(world), places(world) {}
  std::vector<int> counts;
  std::vector<int> places;
};

class MpiCommunicator final : public Communicator {
 public:
  /// All ranks in order.
  MpiCommunicator(std::shared_ptr<MpiSession> session, const Launch& launch)
      : session_(std::move(session)), rank_(launch.rank), world_(launch.world), order_(world_) {
    std::iota(order_.begin(), order_.end(), 0);
    communicator_ = session_->duplicate_world();
  }
  /// `members` are distinct and `rank` is one of them.
  MpiCommunicator(std::shared_ptr<MpiSession> session, std::uint32_t rank,
                  std::span<const std::uint32_t> members)
      : session_(std::move(session)),
        rank_(place_of(rank, members)),
        world_(static_cast<std::uint32_t>(members.size())),
        order_(members.size()) {
    std::iota(order_.begin(), order_.end(), 0);
    std::sort(order_.begin(), order_.end(),
              [&](std::uint32_t a, std::uint32_t b) { return members[a] < members[b]; });
    communicator_ = session_->split_world(to_count(members.front()), to_count(rank_));
  }
  ~MpiCommunicator() override { session_->release(communicator_); }

  void all_gather(device::Stream& stream, ConstDeviceBytes part, DeviceBytes whole) override {
    check_all_gather(part, whole, world_);
    as_host(stream).enqueue([=, this] { gather(part, whole); });
  }
  void reduce_scatter(device::Stream& stream, DeviceBytes whole, DeviceBytes part, DType type,
                      DeviceBytes scratch) override {
    check_reduce_scatter(whole, part, type, scratch, world_);
    as_host(stream).enqueue(
        [=, this] { reduce("reduce_scatter", whole, part.raw(), type, scratch); });
  }
  void all_reduce(device::Stream& stream, DeviceBytes whole, DType type,
                  DeviceBytes scratch) override {
    check_all_reduce(whole, type, scratch, world_);
    as_host(stream).enqueue([=, this] {
      const Parts parts(whole.size(), world_);
      std::byte* own = whole.raw() + parts.at(rank_, 0) * kPage;
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
  static std::uint32_t place_of(std::uint32_t rank, std::span<const std::uint32_t> members) {
    return static_cast<std::uint32_t>(std::find(members.begin(), members.end(), rank) -
                                      members.begin());
  }

  void gather(ConstDeviceBytes part, DeviceBytes whole) {
    const bool in_place = part.raw() == whole.raw() + rank_ * part.size();
    const void* from = in_place ? MPI_IN_PLACE : part.raw();
    const int pages = to_count(part.size() / kPage);
    session_->run({"all_gather", whole.size()}, [&](MPI_Request* request) {
      return MPI_Iallgather(from, pages, session_->page(), whole.raw(), pages, session_->page(),
                            communicator_, request);
    });
  }

  /// Every rank's part of `whole` from that rank: the second half of an all_reduce.
  void gather_in_place(DeviceBytes whole) {
    const Parts parts(whole.size(), world_);
    Exchange arriving(world_);
    for (std::uint32_t rank = 0; rank < world_; ++rank) {
      arriving.counts[rank] = to_count(parts.count(rank, 0, parts.longest()));
      arriving.places[rank] = to_count(parts.at(rank, 0));
    }
    session_->run({"all_reduce", whole.size()}, [&](MPI_Request* request) {
      return MPI_Iallgatherv(MPI_IN_PLACE, 0, session_->page(), whole.raw(), arriving.counts.data(),
                             arriving.places.data(), session_->page(), communicator_, request);
    });
  }

  /// `out` = the sum over ranks of this rank's part of their `whole`. In rounds: as much of every
  /// part as the scratch holds from all ranks is exchanged, then added up in rank order.
  void reduce(std::string_view name, DeviceBytes whole, std::byte* out, DType type,
              DeviceBytes scratch) {
    const Parts parts(whole.size(), world_);
    const std::uint64_t piece = scratch.size() / kPage / world_;
    std::vector<const std::byte*> sources(world_);
    for (std::uint64_t page = 0; page < parts.longest(); page += piece) {
      exchange({name, whole.size()}, whole, scratch, page, piece);
      for (std::uint32_t i = 0; i < world_; ++i) {
        const std::uint32_t member = order_[i];
        sources[i] = member == rank_ ? whole.raw() + parts.at(rank_, page) * kPage
                                     : scratch.raw() + member * piece * kPage;
      }
      const Bytes bytes = parts.count(rank_, page, piece) * kPage;
      if (bytes != 0) sum_in_order(sources, out + page * kPage, bytes, type);
    }
  }

  /// Pages [page, page + piece) of rank's part go to it; what the others have of this rank's
  /// arrives in `scratch`, `piece` pages for each rank.
  void exchange(const Collective& what, DeviceBytes whole, DeviceBytes scratch, std::uint64_t page,
                std::uint64_t piece) {
    const Parts parts(whole.size(), world_);
    Exchange leaving(world_);
    Exchange arriving(world_);
    for (std::uint32_t rank = 0; rank < world_; ++rank) {
      if (rank == rank_) continue;  // the sum reads it where it is
      leaving.counts[rank] = to_count(parts.count(rank, page, piece));
      leaving.places[rank] = to_count(parts.at(rank, page));
      arriving.counts[rank] = to_count(parts.count(rank_, page, piece));
      arriving.places[rank] = to_count(rank * piece);
    }
    session_->run(what, [&](MPI_Request* request) {
      return MPI_Ialltoallv(whole.raw(), leaving.counts.data(), leaving.places.data(),
                            session_->page(), scratch.raw(), arriving.counts.data(),
                            arriving.places.data(), session_->page(), communicator_, request);
    });
  }

  std::shared_ptr<MpiSession> session_;
  std::uint32_t rank_;   ///< this one's number among the members, which is its rank in MPI
  std::uint32_t world_;  ///< number of members
  std::vector<std::uint32_t> order_;  ///< members in the order of their ranks in the run
  MPI_Comm communicator_ = MPI_COMM_NULL;
};

}  // namespace

std::unique_ptr<Communicator> make_mpi_communicator(std::shared_ptr<MpiSession> session,
                                                    const Launch& launch,
                                                    std::span<const std::uint32_t> members) {
  if (members.empty()) return std::make_unique<MpiCommunicator>(std::move(session), launch);
  return std::make_unique<MpiCommunicator>(std::move(session), launch.rank, members);
}

}  // namespace ballast::comm
