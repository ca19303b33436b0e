#include "src/engine/gate_inputs.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <span>

namespace ballast::engine {
namespace {

constexpr std::array kLosses = {&model::PairResult::loss, &model::PairResult::chosen,
                                &model::PairResult::rejected, &model::PairResult::correct};

}  // namespace

model::PairResult add_losses(std::span<const double> reported, bool pairs) {
  model::PairResult sum;
  for (std::size_t i = 0; i < reported.size(); ++i) {
    sum.*kLosses[pairs ? i % kLosses.size() : 0] += reported[i];
  }
  return sum;
}

model::PairResult mean_of(const model::PairResult& sum, double count) {
  model::PairResult mean = sum;
  for (const auto member : kLosses) mean.*member /= count;
  return mean;
}

GateInputs sum_over_ranks(const model::PairResult& losses, const std::vector<GradientStats>& own,
                          const step::RankSizes& sizes, comm::Ranks* ranks) {
  // One message per rank: the losses, then the statistics by block.
  const std::size_t bytes = sizeof losses + own.size() * sizeof(GradientStats);
  const std::uint32_t world = ranks == nullptr ? 1 : ranks->world();
  std::vector<std::byte> sent(bytes);
  std::memcpy(sent.data(), &losses, sizeof losses);
  std::ranges::copy(std::as_bytes(std::span(own)), sent.data() + sizeof losses);
  std::vector<std::byte> by_rank = sent;
  if (world > 1) {
    by_rank.resize(world * bytes);
    ranks->all_gather(sent, by_rank);
  }
  const auto read = [&](std::size_t offset, auto value) {
    std::memcpy(&value, by_rank.data() + offset, sizeof value);
    return value;
  };
  GateInputs sums;
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    const auto one = read(rank * bytes, model::PairResult());
    for (const auto member : kLosses) sums.losses.*member += one.*member;
  }
  for (std::size_t block = 0; block < own.size(); ++block) {
    for (std::uint32_t shard = 0; shard < world; ++shard) {
      const std::size_t begin = sizes.owner_of(shard) * bytes + sizeof losses;
      const auto one = read(begin + block * sizeof(GradientStats), GradientStats());
      sums.squares += one.sum_of_squares;
      sums.non_finite += one.non_finite;
    }
  }
  return sums;
}

}  // namespace ballast::engine
