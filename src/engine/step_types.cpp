#include "ballast/engine/step_types.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/model/block_layout.h"

namespace ballast::engine {

namespace {

/// Checks positions, because a position outside its sequence would read other memory. `length`:
/// tokens per sequence in `positions`, of which the first may have a position up to `first`.
void check_positions(std::span<const std::int32_t> positions, std::size_t length,
                     std::size_t first) {
  for (std::size_t i = 0; i < positions.size(); ++i) {
    const bool begins = i % length == 0;
    const bool continues = begins ? positions[i] > 0 && std::size_t(positions[i]) <= first
                                  : positions[i] == positions[i - 1] + 1;
    if (positions[i] == 0 || continues) continue;
    throw Error(ErrorCategory::data,
                fmt::format("token {} of the batch has position {}; a position must be 0 or one "
                            "more than the preceding token's in its sequence",
                            i, positions[i]));
  }
}

}  // namespace

std::uint64_t count_losses(std::span<const std::int32_t> targets, std::size_t size) {
  std::uint64_t count = 0;
  for (std::size_t first = 0; first < targets.size(); first += size) {
    const auto part = targets.subspan(first, size);
    const auto counts = [](std::int32_t target) { return target >= 0; };
    count += std::any_of(part.begin(), part.end(), counts) ? 1 : 0;
  }
  return count;
}

void copy_batch(const Blueprint& blueprint, const TokenBatch& batch, std::uint32_t micro_batches,
                std::span<const HostBytes> buffers) {
  const model::MicroBatchShape& shape = blueprint.shape;
  const std::size_t size = shape.tokens() * micro_batches;
  const bool whole = blueprint.packed && shape.slices > 1;
  expects(batch.tokens.size() == size && batch.targets.size() == size &&
              batch.positions.size() == (blueprint.has_positions() ? size : 0) &&
              batch.whole_positions.size() == (whole ? shape.slices * size : 0),
          "engine: wrong batch size");
  check_positions(batch.positions, shape.length, blueprint.mesh.sequence_place() * shape.length);
  check_positions(batch.whole_positions, shape.whole_length(), 0);
  const std::vector<std::int32_t> sum_rows = model::number_sum_rows(blueprint.own(), batch.tokens);
  for (std::uint32_t m = 0; m < micro_batches; ++m) {
    std::byte* to = buffers[m].data();
    for (const std::span<const std::int32_t> ids :
         {batch.tokens, batch.targets, std::span(sum_rows), batch.positions,
          batch.whole_positions}) {
      const auto part = ids.subspan(ids.size() / micro_batches * m, ids.size() / micro_batches);
      if (part.empty()) continue;
      std::memcpy(to, part.data(), part.size_bytes());
      to += part.size_bytes();
    }
  }
}

}  // namespace ballast::engine
