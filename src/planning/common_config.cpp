#include "src/planning/common_config.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <future>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "ballast/comm/together.h"
#include "ballast/planning/choices.h"
#include "ballast/planning/planner.h"

#include "src/planning/machine_share.h"

namespace ballast::planning {
namespace {

using Clock = std::chrono::steady_clock;

MachineShare find_share(comm::Ranks& ranks, const config::Config& config) {
  const RankPlace mine = read_place(ranks.launch(), config);
  std::vector<RankPlace> all(ranks.world());
  ranks.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  return share_of(all, ranks.rank());
}

/// Bytes per second that one rank receives when all exchange; the best of a few tries.
double measure_exchange(comm::Ranks& ranks) {
  constexpr int kTries = 3;
  const Bytes part = std::max(64 * kKiB, 32 * kMiB / ranks.world());
  const std::vector<std::byte> mine(part);
  std::vector<std::byte> whole(part * ranks.world());
  double seconds = std::numeric_limits<double>::max();
  for (int i = 0; i < kTries; ++i) {
    ranks.barrier();
    const auto start = Clock::now();
    ranks.all_gather(mine, whole);
    seconds = std::min(seconds, std::chrono::duration<double>(Clock::now() - start).count());
  }
  return static_cast<double>(whole.size() - part) / std::max(seconds, 1e-9);
}

/// Waits on all ranks until rank 0's `work` is done. They meet again and again, so that no wait is
/// long enough to be taken for a rank that is gone.
void wait_for_first(comm::Ranks& ranks, const std::future<config::Config>& work,
                    double timeout_seconds) {
  const std::chrono::duration<double> pause(std::min(1.0, timeout_seconds / 4.0));
  std::vector<std::byte> done(ranks.world());
  do {
    const bool mine = work.valid() && work.wait_for(pause) == std::future_status::ready;
    const std::byte part{mine ? std::uint8_t{1} : std::uint8_t{0}};
    ranks.all_gather(std::span(&part, 1), done);
  } while (done.front() == std::byte{0});
}

}  // namespace

config::Config common_config(const config::Config& config, comm::Ranks& ranks) {
  const MachineShare share = find_share(ranks, config);
  const bool first = ranks.rank() == 0;
  const auto& launch = ranks.launch();
  std::future<config::Config> decided;
  config::Config shared = config;
  apply_common_share(shared, share);
  const bool open = !ranks.broadcast(leaves_choices(shared) ? "open" : "").empty();
  if (open) {
    const Company company = {.world = launch.world,
                             .local_world = launch.local_world,
                             .sharing = static_cast<std::uint32_t>(share.sharing),
                             .received_per_second = measure_exchange(ranks)};
    config::Config own = shared;
    apply_own_share(own, share);
    if (first) {
      decided =
          std::async(std::launch::async, [own, company] { return decide_choices(own, company); });
    }
    wait_for_first(ranks, decided, config.ballast.comm_timeout_seconds);
  }
  std::string text;
  comm::together(&ranks, [&] {
    if (!first) return;
    if (open) {
      config::Config chosen = decided.get();
      chosen.ballast.update_threads = shared.ballast.update_threads;
      chosen.ballast.update_numa_node = shared.ballast.update_numa_node;
      shared = chosen;
    }
    text = config::print(shared);
  });
  shared = config::parse(ranks.broadcast(text), "/", "the config of rank 0", {}, launch.world);
  apply_own_share(shared, share);
  return shared;
}

}  // namespace ballast::planning
