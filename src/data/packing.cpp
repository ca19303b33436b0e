#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "ballast/core/error.h"
#include "ballast/core/random.h"
#include "ballast/data/sequences.h"

#include "src/data/documents.h"

namespace ballast::data {
namespace {

/// Indices of `pieces` from the longest to the shortest. `seed` determines the order of equally
/// long ones.
std::vector<std::uint64_t> longest_first(const std::vector<Piece>& pieces,
                                         std::optional<std::uint64_t> seed) {
  std::vector<std::uint64_t> order(pieces.size());
  for (std::uint64_t i = 0; i < order.size(); ++i) {
    order[i] = seed ? permute(i, order.size(), *seed) : i;
  }
  std::stable_sort(order.begin(), order.end(), [&](std::uint64_t a, std::uint64_t b) {
    return pieces[a].length > pieces[b].length;
  });
  return order;
}

/// Places each piece in a sequence by best-fit decreasing. Returns their sequences and the number
/// of sequences.
std::pair<std::vector<std::uint64_t>, std::uint64_t> place(const std::vector<Piece>& pieces,
                                                           std::uint64_t length,
                                                           std::optional<std::uint64_t> seed) {
  std::vector<std::uint64_t> sequence_of(pieces.size());
  std::map<std::uint64_t, std::vector<std::uint64_t>> open;  // sequences by free space
  std::uint64_t count = 0;
  for (const std::uint64_t i : longest_first(pieces, seed)) {
    const std::uint64_t needed = pieces[i].length;
    expects(needed >= 1 && needed <= length, "packing: a piece does not fit a sequence");
    std::uint64_t space = length;
    const auto fitting = open.lower_bound(needed);
    if (fitting == open.end()) {
      sequence_of[i] = count++;
    } else {
      space = fitting->first;
      sequence_of[i] = fitting->second.back();
      fitting->second.pop_back();
      if (fitting->second.empty()) open.erase(fitting);
    }
    if (space > needed) open[space - needed].push_back(sequence_of[i]);
  }
  return {std::move(sequence_of), count};
}

}  // namespace

std::vector<Piece> cut_documents(std::span<const std::uint64_t> offsets, std::uint64_t length) {
  std::vector<Piece> pieces;
  for (std::size_t document = 0; document + 1 < offsets.size(); ++document) {
    const std::uint64_t end = offsets[document + 1];
    for (std::uint64_t first = offsets[document]; first < end; first += length) {
      const std::uint64_t left = end - first;
      pieces.push_back({.first = first,
                        .length = static_cast<std::uint32_t>(std::min(left, length)),
                        .continues = left > length});
    }
  }
  return pieces;
}

Packing::Packing(std::vector<Piece> pieces, std::uint64_t length,
                 std::optional<std::uint64_t> seed) {
  auto [sequence_of, count] = place(pieces, length, seed);
  // Sequences are numbered by their first piece.
  constexpr std::uint64_t kNone = ~std::uint64_t{0};
  std::vector<std::uint64_t> number(count, kNone);
  std::uint64_t next = 0;
  starts_.assign(count + 1, 0);
  for (std::uint64_t& sequence : sequence_of) {
    if (number[sequence] == kNone) number[sequence] = next++;
    sequence = number[sequence];
    ++starts_[sequence + 1];
  }
  std::partial_sum(starts_.begin(), starts_.end(), starts_.begin());
  std::vector<std::uint64_t> filled(starts_.begin(), starts_.end() - 1);
  pieces_.resize(pieces.size());
  for (std::size_t i = 0; i < pieces.size(); ++i) pieces_[filled[sequence_of[i]]++] = pieces[i];
}

std::span<const Piece> Packing::pieces(std::uint64_t sequence) const {
  return std::span(pieces_).subspan(starts_.at(sequence),
                                    starts_.at(sequence + 1) - starts_[sequence]);
}

std::uint64_t Packing::tokens(std::uint64_t sequence) const {
  std::uint64_t sum = 0;
  for (const Piece& piece : pieces(sequence)) sum += piece.length;
  return sum;
}

}  // namespace ballast::data
