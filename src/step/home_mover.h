#pragma once

#include <cstdint>
#include <vector>

#include "ballast/step/problem.h"

#include "src/step/gradient_mover.h"
#include "src/step/move_context.h"
#include "src/step/update_mover.h"
#include "src/step/weight_mover.h"

namespace ballast::step {

/// Fills and reads the homes of weights and states outside training steps. Data of homes on NVMe
/// pass through the staging buffers of the other movers.
class HomeMover : public Mover {
 public:
  HomeMover(MoveContext& plan, WeightMover& weights, GradientMover& gradients, UpdateMover& updates)
      : Mover(plan), weights_(weights), gradients_(gradients), updates_(updates) {}

  /// Initializes the weights and, for training, the states of `block` on the host and moves them to
  /// their homes.
  void fill(std::uint32_t block, Homes homes);
  /// Writes zeros to the NVMe homes of gradients, so that later writes only overwrite.
  void fill_gradients();
  /// Fills a staging buffer with zeros.
  void fill_with_zeros(Payload payload, std::uint32_t block, BufferId staging, Bytes bytes);
  /// Copies the weights and states of `block` to the host and reads them there.
  void read(std::uint32_t block, Homes homes);

 private:
  struct Home {
    Payload payload;          ///< weights or states
    std::uint32_t sub_group;  ///< for states
    Tier tier;
    BufferId buffer;
    Bytes offset;         ///< offset of its first byte in all of these weights or states
    Bytes bytes;          ///< kept by this rank
    Bytes initial_bytes;  ///< first part, which does not start as zeros
  };

  [[nodiscard]] std::vector<Home> weight_homes(std::uint32_t block) const;
  [[nodiscard]] Home state_home(std::uint32_t block, std::uint32_t group) const;
  template <class Move>
  void in_pieces(Bytes all, Move move) const;
  template <class Handle>
  void for_homes(std::uint32_t block, Homes homes, Handle handle) const;
  void emit_piece(Action action, std::uint32_t block, const Home& home, Bytes offset, Bytes bytes,
                  std::vector<Use> uses);
  BufferId staging_of(std::uint32_t block, const Home& home);
  void fill_home(std::uint32_t block, const Home& home);
  void read_home(std::uint32_t block, const Home& home);

  WeightMover& weights_;
  GradientMover& gradients_;
  UpdateMover& updates_;
};

}  // namespace ballast::step
