#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ballast/schedule/plan.h"
#include "ballast/schedule/rank_sizes.h"

#include "src/schedule/emitter.h"
#include "src/schedule/layout.h"
#include "src/schedule/passage.h"

namespace ballast::schedule {

/// Everything of a plan that is not the passes themselves: how weights, states, gradients and
/// activations come to where an operation needs them and go back to where they live.
class Movements {
 public:
  Movements(std::string name, const Workload& workload, const Placement& placement,
            const Options& options, const Layout& layout, std::uint32_t micro_batches);

  OpId emit(Action action, std::uint32_t block, std::uint32_t micro, std::vector<Use> uses,
            Bytes bytes = 0, double flops = 0.0, Bytes traffic = 0);
  Plan finish() { return emitter_.finish(); }

  void upload_batch(std::uint32_t micro);

  /// The device buffer that holds the whole weights of `block` now, brought there if need be.
  BufferId weights_on_device(std::uint32_t block);

  /// Where the intermediates of `block` stay for its backward pass; kNoBuffer where they do not.
  [[nodiscard]] BufferId intermediates(std::uint32_t block, std::uint32_t micro) const;
  /// Where the forward pass puts the input of `block` (>= 1): its home, or a passing place.
  BufferId place_for_input(std::uint32_t block, std::uint32_t micro);
  /// Sends the input of `block`, in `place`, away if that is where it waits.
  void store_input(std::uint32_t block, std::uint32_t micro, BufferId place);
  /// The input of `block` on the device again.
  BufferId input_for_backward(std::uint32_t block, std::uint32_t micro);

  /// Packs the finished gradient of `block` and brings it, reduced over ranks, to where the update
  /// will read it; its statistics go to the host.
  void deliver_gradient(std::uint32_t block);
  /// Losses to the host, and what follows from them and all statistics.
  OpId gate(bool training);

  /// Reads the states of the first NVMe blocks in update order ahead of their updates, one by one.
  [[nodiscard]] std::uint32_t states_ahead() const;
  void fetch_states_ahead(std::uint32_t ordinal);
  /// The optimizer on `block`. `lag`: see Operation. Blocks are updated in update order.
  void update(std::uint32_t block, std::uint32_t lag);

  /// First values of the weights and states of `block`, made on the host and brought home.
  void fill(std::uint32_t block);
  /// Zeros to the NVMe homes of activations: what is written later only overwrites.
  void fill_activations();
  /// Weights and states of `block` to the host, where they are read.
  void read(std::uint32_t block);

 private:
  struct Home;
  [[nodiscard]] const BlockPlacement& at(std::uint32_t block) const { return place_.blocks[block]; }
  [[nodiscard]] std::uint32_t input_index(std::uint32_t micro) const;

  BufferId weights_on_host(std::uint32_t block);
  BufferId weights_in_staging(std::uint32_t block);
  BufferId share_on_device(std::uint32_t block);
  void upload_weights(std::uint32_t block, Use from, Use to, Bytes bytes);
  void offload_weights(std::uint32_t block, Use from, Use to, Bytes bytes);
  void gather_weights(std::uint32_t block, BufferId from, BufferId to);

  BufferId reduce_gradient(std::uint32_t block, BufferId packed);

  [[nodiscard]] BufferId state_slot(std::uint32_t block) const;
  BufferId states_on_host(std::uint32_t block, std::uint32_t lag);
  void fetch_states(std::uint32_t block, std::uint32_t lag);
  [[nodiscard]] Use permission(std::uint32_t block) const;
  void update_on_device(std::uint32_t block, std::uint32_t lag);
  void update_on_host(std::uint32_t block, std::uint32_t lag);
  void return_weights(std::uint32_t block, BufferId updated);
  void writeback(Action action, std::uint32_t block, BufferId staging, std::uint32_t lag);

  [[nodiscard]] Home weight_home(std::uint32_t block) const;
  [[nodiscard]] Home state_home(std::uint32_t block) const;
  template <class Move>
  void in_pieces(const Home& home, Move move) const;
  void emit_piece(Action action, std::uint32_t block, std::vector<Use> uses, Bytes offset,
                  Bytes bytes);
  void fill_home(std::uint32_t block, const Home& home);
  void read_home(std::uint32_t block, const Home& home);

  const Workload& work_;
  const Placement& place_;
  const Options& options_;
  const Layout& layout_;
  RankSizes rank_;
  Emitter emitter_;
  Passage slots_;
  Passage share_slots_;
  Passage weight_staging_;
  Ring gradient_slots_;
  Ring activation_slots_;
  Ring activation_staging_;
  std::vector<std::uint32_t> swapped_;  ///< blocks with states on NVMe, in update order
  std::vector<std::uint32_t> ordinal_;  ///< by block: its place in swapped_
};

}  // namespace ballast::schedule
