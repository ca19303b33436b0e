#include "src/engine/token_batch.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::engine {
namespace {

/// Checks positions, because a position outside its sequence would read other memory.
void check_positions(std::span<const std::int32_t> positions, std::size_t length) {
  for (std::size_t i = 0; i < positions.size(); ++i) {
    const bool continues = i % length > 0 && positions[i] == positions[i - 1] + 1;
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
  const std::size_t per_micro = blueprint.shape.tokens();
  const std::size_t size = per_micro * micro_batches;
  const bool packed = blueprint.packed;
  expects(batch.tokens.size() == size && batch.targets.size() == size &&
              batch.positions.size() == (packed ? size : 0),
          "engine: wrong batch size");
  if (packed) check_positions(batch.positions, blueprint.shape.length);
  for (std::uint32_t m = 0; m < micro_batches; ++m) {
    std::byte* to = buffers[m].data();
    for (const auto& ids : {batch.tokens, batch.targets, batch.positions}) {
      if (ids.empty()) continue;
      std::memcpy(to, ids.data() + m * per_micro, per_micro * sizeof(std::int32_t));
      to += per_micro * sizeof(std::int32_t);
    }
  }
}

}  // namespace ballast::engine
