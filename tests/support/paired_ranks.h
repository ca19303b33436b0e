#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ballast/comm/communicator.h"

namespace ballast::test {

/// A run of two ranks inside a run of an even number of ranks: 0 and 1, 2 and 3, and so on. All
/// pairs make the same calls, since each call is collective over all ranks.
class PairedRanks final : public comm::Ranks {
 public:
  explicit PairedRanks(comm::Ranks& all) : all_(all), launch_(all.launch()) {
    launch_.rank = launch_.local_rank = all.rank() % 2;
    launch_.world = launch_.local_world = 2;
  }

  const comm::Launch& launch() const override { return launch_; }
  std::string_view kind() const override { return all_.kind(); }
  std::unique_ptr<comm::Communicator> make_channel(
      device::Device& device, std::span<const std::uint32_t> members) override {
    std::vector<std::uint32_t> ranks = {0, 1};
    if (!members.empty()) ranks.assign(members.begin(), members.end());
    for (std::uint32_t& rank : ranks) rank += first();
    return all_.make_channel(device, ranks);
  }
  void all_gather(ConstHostBytes part, HostBytes whole) override {
    std::vector<std::byte> of_all(part.size() * all_.world());
    all_.all_gather(part, of_all);
    std::copy_n(of_all.begin() + static_cast<std::ptrdiff_t>(first() * part.size()), whole.size(),
                whole.begin());
  }
  std::string broadcast(std::string text) override { return all_.broadcast(std::move(text)); }
  void barrier() override { all_.barrier(); }
  void leave() override { all_.leave(); }
  void abort(int status) override { all_.abort(status); }

 private:
  [[nodiscard]] std::uint32_t first() const { return all_.rank() / 2 * 2; }

  comm::Ranks& all_;
  comm::Launch launch_;
};

}  // namespace ballast::test
