#pragma once

#include <cstdint>
#include <vector>

#include "ballast/schedule/workload.h"

#include "src/schedule/layout.h"
#include "src/schedule/movements.h"

namespace ballast::schedule {

/// Emits the operations of the head: one for all tiles of the vocabulary, or visits to one tile
/// after the other.
class HeadOperations {
 public:
  HeadOperations(const Workload& workload, const Placement& placement, const Layout& layout,
                 Movements& movements)
      : work_(workload),
        layout_(layout),
        move_(movements),
        one_pass_(schedule::in_one_pass(workload, placement)) {}

  /// In training. An evaluation visits several tiles one after the other.
  [[nodiscard]] bool in_one_pass() const { return one_pass_; }
  [[nodiscard]] std::uint32_t tiles() const { return work_.vocabulary_tiles; }

  /// `input`: the activation that the head reads; `reference`: that of the reference, whose head
  /// delivers the losses that the head of the same micro-batch then reads.
  void evaluate(std::uint32_t micro, BufferId input, bool reference = false);
  void train(std::uint32_t micro, BufferId input);

  // After the norm (TileOperations::normalize).
  void scan(std::uint32_t tile, std::uint32_t micro, bool reference = false);
  /// The tile's part of the gradient of the head's norm and, unless the vocabulary is tied, the
  /// gradient of the tile.
  void differentiate(std::uint32_t tile, std::uint32_t micro);
  /// The gradient of a tied tile.
  void differentiate_tied(std::uint32_t tile, std::uint32_t micro);
  /// The losses, unless the last scan has reported them, and the gradient of the norm.
  void end(std::uint32_t micro, BufferId input, bool training);

  /// Sets Plan::first_head and last_head: where the norm of the head, or its one operation, is.
  void mark(Plan& plan) const;

 private:
  [[nodiscard]] std::vector<Use> whole(std::uint32_t micro, BufferId input, bool reference);
  void use_losses(std::vector<Use>& uses, std::uint32_t micro, bool reference) const;
  [[nodiscard]] std::vector<Use> visit(std::uint32_t block, std::uint32_t micro, bool sums);
  [[nodiscard]] bool is_trained(std::uint32_t tile) const;
  [[nodiscard]] double flops_of_tile(std::uint32_t tile) const;

  const Workload& work_;
  const Layout& layout_;
  Movements& move_;
  bool one_pass_;
};

}  // namespace ballast::schedule
