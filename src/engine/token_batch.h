#pragma once

#include <cstdint>
#include <span>

#include "ballast/core/view.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/step_types.h"

namespace ballast::engine {

/// Returns how many parts of `size` targets have a counted one.
[[nodiscard]] std::uint64_t count_losses(std::span<const std::int32_t> targets, std::size_t size);

/// Copies the micro-batches to their host `buffers`: tokens, targets, slots, positions. Throws
/// Error(data) for positions that violate TokenBatch.
void copy_batch(const Blueprint& blueprint, const TokenBatch& batch, std::uint32_t micro_batches,
                std::span<const HostBytes> buffers);

}  // namespace ballast::engine
