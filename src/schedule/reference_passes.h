#pragma once

#include <cstdint>
#include <vector>

#include "ballast/schedule/workload.h"

#include "src/schedule/head_operations.h"
#include "src/schedule/layout.h"
#include "src/schedule/movements.h"
#include "src/schedule/passage.h"
#include "src/schedule/tile_operations.h"

namespace ballast::schedule {

/// Emits the forward passes of the reference (Workload::pairs_bytes), each just before that of the
/// trained model through the same block, so that weights cross once for both. Nothing is kept of
/// them but the losses that their head delivers. Without a reference they are nothing.
class ReferencePasses {
 public:
  ReferencePasses(const Workload& workload, const Layout& layout, Movements& movements,
                  TileOperations& tiles, HeadOperations& head, std::uint32_t micro_batches)
      : work_(workload),
        layout_(layout),
        move_(movements),
        tiles_(tiles),
        head_(head),
        slots_(layout.reference_slots),
        inputs_(micro_batches, kNoBuffer) {}

  /// `input`: the trained model's. Blocks before the first differentiated one have no adapters, so
  /// what they compute is also the reference's.
  void forward(std::uint32_t block, std::uint32_t micro, BufferId input);
  /// The whole head, before an operation of the trained model that handles all tiles.
  void evaluate_head(std::uint32_t micro);
  // Visits to its tiles, before those of the trained model.
  void normalize_for_head(std::uint32_t micro);
  void scan_head(std::uint32_t tile, std::uint32_t micro);

 private:
  const Workload& work_;
  const Layout& layout_;
  Movements& move_;
  TileOperations& tiles_;
  HeadOperations& head_;
  Ring slots_;
  std::vector<BufferId> inputs_;  ///< per micro-batch: the activation that the next block reads
};

}  // namespace ballast::schedule
