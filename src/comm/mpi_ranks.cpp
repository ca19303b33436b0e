#include <cstdio>
#include <cstdlib>
#include <utility>

#include "ballast/core/error.h"

#include "src/comm/factories.h"
#include "src/comm/host_work.h"
#include "src/comm/mpi_communicator.h"

namespace ballast::comm {
namespace {

class MpiRanks final : public Ranks {
 public:
  MpiRanks(const Launch& launch, const JoinOptions& options)
      : launch_(launch),
        patience_(std::make_shared<Patience>(options)),
        session_(std::make_shared<MpiSession>(launch, patience_)) {
    communicator_ = session_->duplicate_world();
  }
  ~MpiRanks() override { session_->release(communicator_); }

  const Launch& launch() const override { return launch_; }
  std::string_view kind() const override { return "mpi"; }

  std::unique_ptr<Communicator> make_channel(device::Device& device,
                                             std::span<const std::uint32_t> ranks) override {
    Members members(ranks, rank(), world());
    if (device.kind() == "cuda") return make_nccl_communicator(*this, members, device, patience_);
    check_host_device(device);
    return make_mpi_communicator(session_, std::move(members));
  }

  void all_gather(ConstHostBytes part, HostBytes whole) override {
    expects(whole.size() == world() * part.size(), "all_gather: the whole is not a part per rank");
    const int count = to_count(part.size());
    session_->run({"all_gather", whole.size()}, [&](MPI_Request* request) {
      return MPI_Iallgather(part.data(), count, MPI_BYTE, whole.data(), count, MPI_BYTE,
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
  std::shared_ptr<Patience> patience_;
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
