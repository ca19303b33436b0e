#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/core/descriptor.h"
#include "ballast/engine/engine.h"
#include "ballast/text/json.h"

namespace ballast::train {

// A checkpoint is a folder `step-N` in the folder `checkpoints` of a run:
//   rank-R.states    rank R's ranges (engine::StateRange), one after the other, without gaps
//   rank-R.swap-P    rank R's swap file of path P, with the ranges on NVMe (checkpoint_swap.h)
//   rank-R.json      where they are, and the XXH3 of each MiB
//   checkpoint.json  what else the run needs to go on, and the XXH3 of each rank-R.json
// Both JSON files hold their own checksum. The folder is complete on the disk before it gets its
// name, so there is never a part of one.

inline constexpr const char* kCheckpoints = "checkpoints";

/// What a run needs to go on, beside its states.
struct CheckpointFacts {
  std::uint64_t step = 0;     ///< finished steps
  std::uint64_t updates = 0;  ///< of them, those that were not skipped
  std::uint64_t skipped_in_a_row = 0;
  std::uint64_t batch = 0;          ///< sequences of a step, all ranks
  std::uint64_t length = 0;         ///< tokens of a sequence
  std::uint64_t metrics_bytes = 0;  ///< of metrics.jsonl
  /// Batches that were left out so far: step k takes batch k + skipped_batches of the data.
  std::uint64_t skipped_batches = 0;
  std::vector<double> losses;  ///< of the last steps, for ballast.spike (Spikes::losses())
};

/// Writes a checkpoint of `engine` to the run directory `run` and removes the oldest ones, so that
/// `keep` remain. Collective: all `ranks` (nullptr: one) must see the same folder. Returns the new
/// folder. Throws Error(io) and leaves nothing of it if the disk is full, for example.
std::filesystem::path write_checkpoint(engine::Engine& engine, const std::filesystem::path& run,
                                       const CheckpointFacts& facts, std::uint64_t keep,
                                       comm::Ranks* ranks);

/// Throws Error(io) if the file system of `run` lacks the space for `keep` checkpoints and one that
/// is being written.
void check_room_for_checkpoints(const engine::Engine& engine, const std::filesystem::path& run,
                                std::uint64_t keep, std::uint32_t world);

/// A checkpoint to read.
class Checkpoint {
 public:
  /// Reads checkpoint.json and the rank-R.json. Throws Error(data) naming the file that is missing
  /// or damaged, Error(io).
  explicit Checkpoint(std::filesystem::path folder);
  ~Checkpoint();
  Checkpoint(Checkpoint&&) noexcept;

  /// The newest whole checkpoint of `run`, for `engine`. Names damaged ones in warnings and skips
  /// them. Collective. Throws Error(data) if there is none, or if the newest is of another model or
  /// other formats than the engine's. Takes only those of fewer than `before` steps.
  static Checkpoint find(const std::filesystem::path& run, const engine::Blueprint& blueprint,
                         comm::Ranks* ranks,
                         std::uint64_t before = std::numeric_limits<std::uint64_t>::max());

  [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }
  [[nodiscard]] const CheckpointFacts& facts() const { return facts_; }

  /// Compares every `of`-th state file, from number `first` on, with its checksums. Throws
  /// Error(data) naming the file and the offset.
  void verify(std::uint32_t first, std::uint32_t of) const;
  /// Throws Error(data) naming the first difference if the states do not fit `blueprint`.
  void check_fits(const engine::Blueprint& blueprint) const;

  /// How many ranks have written it.
  [[nodiscard]] std::uint32_t ranks() const { return static_cast<std::uint32_t>(kept_.size()); }
  /// What is in the swap files of a rank, if anything.
  [[nodiscard]] const engine::KeptStates& kept_by(std::uint32_t rank) const;
  /// What the checkpoints of `run` up to this one keep in the same swap files.
  [[nodiscard]] state::KeptExtents kept_beside(const std::filesystem::path& run,
                                               std::uint32_t rank) const;

  /// The bytes of a range, from whichever ranks have written them: a source for Engine::resume().
  /// Throws Error(data), Error(io).
  void read(const engine::StateRange& range, HostBytes bytes) const;

 private:
  struct StatePart;
  struct Piece {
    engine::StateRange range;
    std::size_t part = 0;
    Bytes offset = 0;  ///< in the part
  };
  void add_rank(const std::string& checksum);
  void add_states(const text::Json& json, const std::filesystem::path& path,
                  const std::filesystem::path& states);
  void add_kept(const engine::KeptStates& kept);
  void add_pieces(const engine::KeptHome& home, const state::Segment& segment);

  std::filesystem::path folder_;
  CheckpointFacts facts_;
  std::vector<std::pair<std::string, std::string>> blocks_;  ///< name and number of elements
  std::vector<StatePart> parts_;
  std::vector<engine::KeptStates> kept_;  ///< by rank
  std::map<std::pair<std::size_t, engine::StateKind>, std::vector<Piece>> pieces_;
};

}  // namespace ballast::train
