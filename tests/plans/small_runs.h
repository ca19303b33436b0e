#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ballast/engine/blueprint.h"

namespace ballast::plans {

/// Features in which runs differ. Any two choices of different features occur together in at least
/// one run, unless the config or the model excludes it.
enum class Feature : std::uint8_t {
  family,
  size,
  layers,
  layer_tiles,
  vocabulary_tiles,
  tied,
  trained,
  pairs,
  ranks,
  stage,
  gathers,
  persistence,
  expert_parallel,
  expert_updates,
  expert_prefetch,
  order,
  update,
  type,
  states,
  micro_batches,
  evaluation,
  data,
  sub_groups,
  checkpoints,
  buffers,
  purpose
};
inline constexpr std::size_t kFeatures = static_cast<std::size_t>(Feature::purpose) + 1;

/// Index of the choice of each feature.
using RunChoices = std::array<std::uint8_t, kFeatures>;

/// A run of a small model, without its placement.
struct SmallRun {
  std::string name;  ///< two digits
  RunChoices choices{};

  [[nodiscard]] const std::string& choice(Feature feature) const;
  /// "family=gpt2 size=small ...".
  [[nodiscard]] std::string describe() const;
};

/// The choices of `feature` by name.
const std::vector<std::string>& choices_of(Feature feature);

/// The runs in a fixed order, drawn greedily to cover many pairs of choices.
const std::vector<SmallRun>& small_runs();

/// Pairs of choices that some random run has, but none of small_runs(): "family=gpt2 stage=1".
std::vector<std::string> uncovered_pairs();

inline constexpr std::uint64_t kPlacements = 4;

/// The sized blueprint of the run with placement `seed` (0 to kPlacements - 1): drawn per block,
/// whatever the budgets are. It has no schedule and no ledger.
engine::Blueprint outline_of(const SmallRun& run, std::uint64_t seed);

/// Like outline_of(), with the results of attention kept by all layers that can keep them alone;
/// empty if there is none.
std::optional<engine::Blueprint> outline_with_attention(const SmallRun& run, std::uint64_t seed);

/// The memory of the host device's kernels for micro-batches of a shape, the same on every machine:
/// the part that depends on instruction sets is replaced.
model::KernelSizes kernel_sizes(const model::Architecture& model, DType type,
                                model::MicroBatchShape shape);

}  // namespace ballast::plans
