#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/engine/background_save.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/home_piece.h"
#include "ballast/engine/saved_states.h"
#include "ballast/model/architecture.h"
#include "ballast/plan/plan.h"
#include "ballast/state/store.h"

namespace ballast::engine {

/// Weights and states of a running engine, from which checkpoints are made. All functions that do
/// not say otherwise are collective and wait for all updates first; they throw Error(state) for a
/// blueprint without states.
class Snapshot {
 public:
  /// `settle` waits for all updates. `ranks`: nullptr with one rank. All arguments must outlive the
  /// object.
  Snapshot(const Blueprint& blueprint, state::Store& store, comm::Ranks* ranks,
           std::function<void()> settle, Perform perform);
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  /// Passes the ranges of saved_ranges() to `sink` in this order, each in one or several parts in
  /// ascending order.
  void save(const StateSink& sink, step::Homes homes = {});
  /// Passes background_ranges() to `sink` in this order, as they are now, and calls `end`, both on
  /// another thread, while training continues: an update waits until its block has been passed.
  /// `sink` and `end` may throw: BackgroundSave::finish() rethrows. End one before the next.
  std::shared_ptr<BackgroundSave> save_in_background(const StateSink& sink,
                                                     std::function<void()> end);
  /// Returns when the operation may overwrite what save_in_background() is saving. Waits for no
  /// update.
  void before(const plan::Operation& operation) const;
  /// Leaves out what save_in_background() has not begun, so that no operation waits for it.
  void cancel();

  /// Weights and states on NVMe stay as they are now, for `checkpoint`: later updates are written
  /// elsewhere (step::Options::kept_checkpoints at a time). Nothing is copied. Returns when
  /// they are on the disks. Throws Error(io).
  KeptStates keep(std::uint64_t checkpoint);
  /// The checkpoint no longer needs them. Does nothing for an unknown one. Waits for no update.
  void release(std::uint64_t checkpoint);
  /// The checkpoints for which states are kept.
  [[nodiscard]] std::vector<std::uint64_t> kept() const;
  /// Names the swap files: state::SwapSpace::link(). Only if keep() has kept something.
  [[nodiscard]] std::vector<std::filesystem::path> link(const std::filesystem::path& folder,
                                                        const std::string& name,
                                                        const std::string& elsewhere) const;

  /// Writes weights and states to their homes, before any step: `source` is asked for this rank's
  /// entries of every array, in parts. With `reused` swap files, those on NVMe are there already:
  /// `here`. `kept`: all that checkpoints keep in these files. Throws the errors of `source`.
  void restore(const StateSource& source, bool reused, const KeptStates& here,
               const state::KeptExtents& kept);

  /// fp32 master weights of one tensor.
  std::vector<float> read_weights(std::size_t block, const model::TensorSpec& tensor);
  /// fp32 master weights of a block, at the offsets of its tensors; other elements are zero. Reads
  /// the block once.
  std::vector<float> read_block(std::size_t block);
  /// XXH3 over the XXH3 of each array of weights and states, in the order of whole_ranges(): equal
  /// for every placement, sub-group size and stage with the same number of ranks.
  std::uint64_t hash();

 private:
  void settle() const;

  const Blueprint& blueprint_;
  state::Store& store_;
  comm::Ranks* ranks_;
  std::function<void()> settle_;
  Perform perform_;
  std::shared_ptr<BackgroundSave> saving_;  ///< the last one; replaced when nothing runs
};

}  // namespace ballast::engine
