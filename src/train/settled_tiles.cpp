#include "src/train/settled_tiles.h"

#include <filesystem>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/comm/collective_try.h"
#include "ballast/planner/run_plan.h"

#include "src/train/run_checkpoints.h"

namespace ballast::train {

config::Config settle_tiles(const config::Config& config, comm::Ranks* ranks,
                            const std::atomic<bool>* interrupted, const RunOptions& options) {
  const std::filesystem::path from = resumed_from(config, options);
  if (!config.open_tiles.any() || from.empty()) {
    return planner::settle_tiles(config, ranks, interrupted, options.source);
  }
  config::Config settled = config;
  bool found = false;
  comm::collective_try(ranks, [&] {
    if (ranks != nullptr && ranks->rank() != 0) return;
    const auto tiles = checkpoint::tiles_of(from);
    found = tiles.has_value();
    if (!found) return;
    if (config.open_tiles.vocabulary) settled.model.vocabulary_tiles = tiles->vocabulary;
    if (config.open_tiles.layers) settled.model.layer_tiles = tiles->layers;
  });
  if (comm::decided_by_root(ranks, found)) return planner::with_tiles_of_root(settled, ranks);
  return planner::settle_tiles(config, ranks, interrupted, options.source);
}

}  // namespace ballast::train
