#include <algorithm>
#include <cstddef>
#include <vector>

#include <gtest/gtest.h>

#include "src/model/compute/kernel_arguments.h"
#include "tests/unit/model/cuda/host_ops.h"

namespace ballast::model::regrouping_test {
namespace {

constexpr std::size_t kParts = 3;
constexpr std::size_t kSequences = 2;
constexpr std::size_t kLength = 5;
constexpr std::size_t kFirst = 4;
using Values = std::vector<float>;

Regrouping order(RowOrder from, RowOrder to, std::size_t others) {
  return {.slices = kParts,
          .sequences = kSequences,
          .length = kLength,
          .first = kFirst,
          .others = others,
          .from = from,
          .to = to};
}

/// Names the value in a column of a row of a whole sequence. `group`: queries, keys or values.
float name_of(std::size_t sequence, std::size_t row, std::size_t group, std::size_t column) {
  return static_cast<float>(((sequence * 100 + row) * 10 + group) * 1000 + column);
}

/// Columns of all parts in [queries | keys | values].
std::size_t wide(std::size_t group, std::size_t others) {
  return kParts * (group == 0 ? kFirst : others);
}

/// The rows of one part with all heads.
Values rows_of(std::size_t part, std::size_t others) {
  Values rows;
  for (std::size_t sequence = 0; sequence < kSequences; ++sequence) {
    for (std::size_t row = 0; row < kLength; ++row) {
      for (std::size_t group = 0; group < 3; ++group) {
        for (std::size_t column = 0; column < wide(group, others); ++column) {
          rows.push_back(name_of(sequence, part * kLength + row, group, column));
        }
      }
    }
  }
  return rows;
}

/// Whole sequences with the heads of one part.
Values heads_of(std::size_t part, std::size_t others) {
  Values rows;
  for (std::size_t sequence = 0; sequence < kSequences; ++sequence) {
    for (std::size_t row = 0; row < kParts * kLength; ++row) {
      for (std::size_t group = 0; group < 3; ++group) {
        const std::size_t own = wide(group, others) / kParts;
        for (std::size_t column = part * own; column < (part + 1) * own; ++column) {
          rows.push_back(name_of(sequence, row, group, column));
        }
      }
    }
  }
  return rows;
}

/// All ranks copy from one order to by_slice, exchange, and copy to the other.
std::vector<Values> exchanged(const std::vector<Values>& of_ranks, RowOrder from, RowOrder to,
                              std::size_t others) {
  const auto ops = test::host_ops<float>();
  const std::size_t size = of_ranks.front().size();
  const std::size_t part = size / kParts;
  std::vector<Values> received(kParts, Values(size));
  for (std::size_t rank = 0; rank < kParts; ++rank) {
    Values sent(size);
    ops.heads->regroup(order(from, RowOrder::by_slice, others), of_ranks[rank].data(), sent.data());
    for (std::size_t to_rank = 0; to_rank < kParts; ++to_rank) {
      std::copy_n(&sent[to_rank * part], part, &received[to_rank][rank * part]);
    }
  }
  std::vector<Values> results(kParts, Values(size));
  for (std::size_t rank = 0; rank < kParts; ++rank) {
    ops.heads->regroup(order(RowOrder::by_slice, to, others), received[rank].data(),
                       results[rank].data());
  }
  return results;
}

TEST(Regrouping, ExchangesRowsOfAllHeadsForWholeSequencesOfSomeHeads) {
  for (const std::size_t others : {std::size_t{2}, std::size_t{0}}) {
    std::vector<Values> rows;
    std::vector<Values> heads;
    for (std::size_t part = 0; part < kParts; ++part) {
      rows.push_back(rows_of(part, others));
      heads.push_back(heads_of(part, others));
    }
    EXPECT_EQ(exchanged(rows, RowOrder::local, RowOrder::by_heads, others), heads);
    EXPECT_EQ(exchanged(heads, RowOrder::by_heads, RowOrder::local, others), rows);
  }
}

}  // namespace
}  // namespace ballast::model::regrouping_test
