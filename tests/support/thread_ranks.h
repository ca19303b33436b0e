#pragma once

#include <algorithm>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "ballast/comm/communicator.h"

namespace ballast::test {

/// Ranks that are threads of this process. Without a channel maker only the ranks' own collectives
/// work.
class ThreadRanks final : public comm::Ranks {
 public:
  /// State shared by the ranks of one run.
  struct Meeting {
    explicit Meeting(std::uint32_t world) : barrier(static_cast<std::ptrdiff_t>(world)) {}
    std::barrier<> barrier;
    std::vector<std::byte> bytes;
    std::string text;
  };

  /// Makes the channels of this rank; see Ranks::make_channel.
  using MakeChannel = std::function<std::unique_ptr<comm::Communicator>(
      std::uint32_t rank, std::span<const std::uint32_t> members)>;

  ThreadRanks(std::uint32_t rank, std::uint32_t world, Meeting& meeting, MakeChannel make = {})
      : launch_{.launcher = "test",
                .rank = rank,
                .world = world,
                .local_rank = rank,
                .local_world = world},
        meeting_(meeting),
        make_(std::move(make)) {}

  const comm::Launch& launch() const override { return launch_; }
  std::string_view kind() const override { return "threads"; }
  std::unique_ptr<comm::Communicator> make_channel(
      device::Device&, std::span<const std::uint32_t> members) override {
    return make_ ? make_(rank(), members) : nullptr;
  }
  void all_gather(ConstHostBytes part, HostBytes whole) override {
    if (rank() == 0) meeting_.bytes.resize(whole.size());
    barrier();
    std::copy(part.begin(), part.end(),
              meeting_.bytes.begin() + static_cast<std::ptrdiff_t>(rank() * part.size()));
    barrier();
    std::copy(meeting_.bytes.begin(), meeting_.bytes.end(), whole.begin());
    barrier();
  }
  std::string broadcast(std::string text) override {
    if (rank() == 0) meeting_.text = text;
    barrier();
    text = meeting_.text;
    barrier();
    return text;
  }
  void barrier() override { meeting_.barrier.arrive_and_wait(); }
  void leave() override {}
  void abort(int status) override { std::_Exit(status); }

 private:
  comm::Launch launch_;
  Meeting& meeting_;
  MakeChannel make_;
};

/// Calls `work` as each of `world` ranks; it must not throw.
inline void as_ranks(std::uint32_t world, const std::function<void(comm::Ranks&)>& work,
                     const ThreadRanks::MakeChannel& make = {}) {
  ThreadRanks::Meeting meeting(world);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      ThreadRanks ranks(rank, world, meeting, make);
      work(ranks);
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace ballast::test
