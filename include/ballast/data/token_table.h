#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

namespace ballast::data {

/// A matrix of the model of which a token reads one row, and the config key of its size.
struct TokenTable {
  std::string key = "model.vocab_size";
  std::uint64_t rows = 0;
};

/// Returns the matrix that limits token ids: `table` if it has fewer rows than the vocabulary, else
/// the embedding, with at most 2^31 rows.
inline TokenTable limit_of_ids(std::uint64_t vocab_size, const std::optional<TokenTable>& table) {
  if (table && table->rows < vocab_size) return *table;
  return {.rows = std::min<std::uint64_t>(vocab_size, std::uint64_t{1} << 31U)};
}

/// Reason of a refusal of an id that is below model.vocab_size.
inline constexpr const char* kNoRow =
    "the tables that the layers read have no row for it; leave such tokens out of the data";

}  // namespace ballast::data
