#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/run_states.h"
#include "ballast/model/architecture.h"
#include "ballast/plan/plan.h"
#include "ballast/state/store.h"
#include "ballast/state/swap_space.h"

namespace ballast::engine {

/// Saves buffers of host memory on a separate thread while training continues. A thread that is
/// about to write to one of them waits until it is saved.
class BackgroundSave {
 public:
  struct Item {
    plan::BufferId buffer = plan::kNoBuffer;
    std::function<void()> save;
  };

  /// Calls the `save` of each part in order, then `end`, all on the thread. After an error nothing
  /// more is called, and no thread waits any longer.
  BackgroundSave(std::vector<Item> parts, std::function<void()> end);
  /// Skips parts that have not begun.
  ~BackgroundSave();
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;

  /// Returns when `buffer` is saved, or if it is not one of the parts.
  void before_write(plan::BufferId buffer);
  /// Returns whether finish() would return immediately.
  [[nodiscard]] bool done() const;
  /// Waits for all parts and the end. Rethrows their exceptions. Call it once.
  void finish();
  /// Skips parts that have not begun; finish() then throws Error(state). The buffers may be freed
  /// when it returns.
  void cancel();

 private:
  void run();
  [[nodiscard]] bool next();

  std::vector<Item> parts_;
  std::function<void()> end_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t saved_ = 0;  ///< number of saved parts
  bool cancelled_ = false;
  bool done_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

class SideStates;

/// Weights and states of a running engine, from which checkpoints are made. Unless stated
/// otherwise, functions are collective and first wait for all updates; they throw Error(state) for
/// a blueprint without states.
class Snapshot {
 public:
  /// `settle` waits for all updates. `ranks`: nullptr with one rank. All arguments must outlive the
  /// object.
  Snapshot(const Blueprint& blueprint, state::Store& store, const SideStates& side,
           comm::Ranks* ranks, std::function<void()> settle, Perform perform);
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  /// Passes the ranges of saved_ranges() to `sink` in this order, each in one or several parts in
  /// ascending order.
  void save(const StateSink& sink, step::Homes homes = {});
  /// Passes background_ranges() to `sink` in this order, in their present state, and calls `end`,
  /// both on another thread, while training continues: an update waits until its block has been
  /// passed. `sink` and `end` may throw; BackgroundSave::finish() rethrows. End one save before the
  /// next.
  std::shared_ptr<BackgroundSave> save_in_background(const StateSink& sink,
                                                     std::function<void()> end);
  /// Returns when the operation may overwrite what save_in_background() is saving. Does not wait
  /// for updates.
  void before(const plan::Operation& operation) const;
  /// Skips what save_in_background() has not begun, so that no operation waits for it.
  void cancel();

  /// Keeps weights and states on NVMe in place for `checkpoint`: later updates are written
  /// elsewhere (for step::Options::kept_checkpoints at a time). Nothing is copied. Returns when
  /// they are on the disks. Throws Error(io).
  KeptStates keep(std::uint64_t checkpoint);
  /// Releases the states of the checkpoint. Does nothing for an unknown one. Does not wait for
  /// updates.
  void release(std::uint64_t checkpoint);
  /// Returns the checkpoints for which states are kept.
  [[nodiscard]] std::vector<std::uint64_t> kept() const;
  /// Names the swap files: state::SwapSpace::link(). Call it only if keep() has kept something.
  [[nodiscard]] std::vector<std::filesystem::path> link(const state::SwapNames& names) const;

  /// Writes weights and states to their homes, before any step, from `source`, in parts, for this
  /// rank's entries of every array. With `reused` swap files, the states `here` are already on
  /// NVMe. `kept`: all extents that checkpoints keep in these files. Throws the errors of `source`.
  void restore(const StateSource& source, bool reused, const KeptStates& here,
               const state::KeptExtents& kept);

  /// Returns the fp32 master weights of one tensor. Side states that the run has changed are
  /// the present ones, also below.
  std::vector<float> read_weights(std::size_t block, const model::TensorSpec& tensor);
  /// Returns the fp32 master weights of a block at the offsets of its tensors; other elements are
  /// zero. Reads the block once.
  std::vector<float> read_block(std::size_t block);
  /// Returns the XXH3 over the XXH3 of each array of weights and states, in the order of
  /// whole_ranges(), together with Engine::side_states() (hash_with()). It is equal
  /// for every placement, sub-group size and stage with the same number of ranks.
  std::uint64_t hash();

 private:
  void settle() const;

  const Blueprint& blueprint_;
  state::Store& store_;
  const SideStates& side_;
  comm::Ranks* ranks_;
  std::function<void()> settle_;
  Perform perform_;
  std::shared_ptr<BackgroundSave> saving_;  ///< the last one; replaced when nothing runs
};

}  // namespace ballast::engine
