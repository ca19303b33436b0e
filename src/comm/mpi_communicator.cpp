#include "src/comm/mpi_communicator.h"

#include <utility>
#include <vector>

#include "src/comm/checks.h"
#include "src/comm/host_work.h"
#include "src/comm/parts.h"
#include "src/comm/sum.h"

namespace ballast::comm {
namespace {

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
        const std::uint32_t member = members_.by_rank()[i];
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
  Members members_;
  std::uint32_t rank_;   ///< this one's place among the members, which is its rank in MPI
  std::uint32_t world_;  ///< number of members
  MPI_Comm communicator_ = MPI_COMM_NULL;
};

}  // namespace

std::unique_ptr<Communicator> make_mpi_communicator(std::shared_ptr<MpiSession> session,
                                                    Members members) {
  return std::make_unique<MpiCommunicator>(std::move(session), std::move(members));
}

}  // namespace ballast::comm
