#include "src/engine/findings.h"

#include <array>
#include <cstddef>
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

Findings sum_findings(const model::PairResult& losses, const std::vector<model::GradientStats>& own,
                      const schedule::RankSizes& sizes, comm::Ranks* ranks) {
  std::vector<model::GradientStats> sent;
  sent.reserve(kLosses.size() + own.size());
  for (const auto member : kLosses) sent.push_back({.sum_of_squares = losses.*member});
  sent.insert(sent.end(), own.begin(), own.end());
  std::vector<model::GradientStats> all = sent;
  const std::uint32_t world = ranks == nullptr ? 1 : ranks->world();
  if (world > 1) {
    all.resize(world * sent.size());
    ranks->all_gather(std::as_bytes(std::span(sent)), std::as_writable_bytes(std::span(all)));
  }
  Findings sums;
  for (std::size_t i = 0; i < sent.size(); ++i) {
    const bool loss = i < kLosses.size();
    for (std::uint32_t p = 0; p < world; ++p) {
      const std::size_t rank = loss ? p : sizes.owner_of(p);
      const model::GradientStats& one = all[rank * sent.size() + i];
      (loss ? sums.losses.*kLosses[i] : sums.squares) += one.sum_of_squares;
      sums.non_finite += one.non_finite;
    }
  }
  return sums;
}

}  // namespace ballast::engine
