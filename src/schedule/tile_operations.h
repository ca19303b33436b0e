#pragma once

#include <cstdint>
#include <vector>

#include "ballast/schedule/workload.h"

#include "src/schedule/layout.h"
#include "src/schedule/movements.h"

namespace ballast::schedule {

/// Emits the operations of the norm before tiles, of a layer or of the head, and of the tiles of
/// layers.
class TileOperations {
 public:
  TileOperations(const Workload& workload, const Layout& layout, Movements& movements)
      : work_(workload), layout_(layout), move_(movements) {
    for (std::uint32_t b = 0; b < workload.blocks.size(); ++b) {
      if (workload.blocks[b].routes) last_router_ = b;
    }
  }

  /// The norm in `block`. `input`: the activation that it reads. `sums`: the tiles add to it.
  void normalize(std::uint32_t block, std::uint32_t micro, BufferId input, bool sums);
  /// The norm of the head, for the reference.
  void normalize_reference(std::uint32_t micro, BufferId input);
  /// The norm and the router in `block`; again: for the backward pass, with the same choices.
  enum class Visit : std::uint8_t { training, evaluation, again };
  void route(std::uint32_t block, std::uint32_t micro, BufferId input, Visit visit);
  /// A tile of a layer. `output`: what all of them have added, from the last one; else kNoBuffer.
  void forward(std::uint32_t block, std::uint32_t micro, BufferId output);
  void backward(std::uint32_t block, std::uint32_t micro);
  /// The backward pass of a layer's norm, after its tiles.
  void norm_backward(std::uint32_t block, std::uint32_t micro, BufferId input);

 private:
  [[nodiscard]] std::vector<Use> of_norm(std::uint32_t block, BufferId input, BufferId rows);
  [[nodiscard]] std::vector<Use> of_tile(std::uint32_t block, std::uint32_t micro);
  [[nodiscard]] model::Kernel kernel(std::uint32_t block, bool backward) const;
  void compute(bool backward, std::uint32_t block, std::uint32_t micro, std::vector<Use> uses,
               double flops, Bytes traffic);
  [[nodiscard]] Bytes exchanged_bytes(std::uint32_t block, bool backward) const;
  void share_routing(std::uint32_t block, std::uint32_t micro);

  const Workload& work_;
  const Layout& layout_;
  Movements& move_;
  std::uint32_t last_router_ = 0;
};

}  // namespace ballast::schedule
