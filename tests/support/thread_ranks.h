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
#include <vector>

#include "ballast/comm/communicator.h"

namespace ballast::test {

/// Ranks that are threads of this process, for tests that need only the ranks' own collectives.
class ThreadRanks final : public comm::Ranks {
 public:
  /// State shared by the ranks of one run.
  struct Meeting {
    explicit Meeting(std::uint32_t world) : barrier(static_cast<std::ptrdiff_t>(world)) {}
    std::barrier<> barrier;
    std::vector<std::byte> bytes;
    std::string text;
  };

  ThreadRanks(std::uint32_t rank, std::uint32_t world, Meeting& meeting)
      : launch_{.launcher = "test",
                .rank = rank,
                .world = world,
                .local_rank = rank,
                .local_world = world},
        meeting_(meeting) {}

  const comm::Launch& launch() const override { return launch_; }
  std::string_view kind() const override { return "threads"; }
  std::unique_ptr<comm::Communicator> make_channel(device::Device&,
                                                   std::span<const std::uint32_t>) override {
    return nullptr;
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
  void abort(int status) override { std::_Exit(status); }

 private:
  comm::Launch launch_;
  Meeting& meeting_;
};

/// Calls `work` as each of `world` ranks; it must not throw.
inline void as_ranks(std::uint32_t world, const std::function<void(comm::Ranks&)>& work) {
  ThreadRanks::Meeting meeting(world);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      ThreadRanks ranks(rank, world, meeting);
      work(ranks);
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace ballast::test
