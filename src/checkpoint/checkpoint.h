#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/comm/communicator.h"
#include "ballast/core/memory.h"
#include "ballast/engine/engine.h"
#include "ballast/text/json.h"

namespace ballast::text {
class Json;
}

namespace ballast::checkpoint {

// A checkpoint is a folder `step-N` in the folder `checkpoints` of a run:
//   rank-R.states    rank R's ranges (engine::StateRange), consecutive, without gaps
//   rank-R.swap-P    rank R's swap file of path P, with the ranges on NVMe (kept_checkpoints.h)
//   rank-R.json      their places, and the XXH3 of each MiB
//   checkpoint.json  the other facts of the run, and the XXH3 of each rank-R.json
// Both JSON files contain their own checksum. The folder is complete on the disk before it gets its
// name, so partial checkpoints do not exist.
//
// A portable checkpoint (export_states()) is a folder of any name:
//   block-B.safetensors  the whole arrays of a block, one tensor per kind of state
//   checkpoint.json      the facts, "format": "portable", and the XXH3 of each MiB of the files

inline constexpr const char* kCheckpoints = "checkpoints";

/// A checkpoint to read, portable or not.
class Checkpoint {
 public:
  struct Block {
    std::string name;
    Elems elements = 0;
    /// Names of frozen tensors, without the block's prefix. They come after the others and have no
    /// states.
    std::vector<std::string> frozen = {};
    bool operator==(const Block&) const = default;
  };

  using Check = std::function<void(const Checkpoint&)>;

  /// Returns the description of a block in a checkpoint.
  [[nodiscard]] static Block describe(const model::BlockSpec& spec);
  [[nodiscard]] static text::Json json_of(const Block& block);

  /// Reads checkpoint.json and the rank-R.json files, or the heads of the safetensors files. Throws
  /// Error(data) with the file that is missing or damaged, Error(io) with a file that the system
  /// cannot read.
  explicit Checkpoint(std::filesystem::path folder);
  ~Checkpoint();
  Checkpoint(Checkpoint&&) noexcept;

  /// Opens and verifies the checkpoint `from`, or the latest complete one of the run directory
  /// `from` with fewer than `before` steps, for a run with `blueprint`. Skips damaged checkpoints
  /// of a run with a warning. Collective. Throws Error(data) if there is none, or if its model or
  /// formats differ from the blueprint's. Throws Error(io), for a run a JointError, if the system
  /// cannot read one, because that is not damage. `check`, if given, is called after the model was
  /// compared; it may throw.
  static Checkpoint open(const std::filesystem::path& from, const engine::Blueprint& blueprint,
                         comm::Ranks* ranks,
                         std::uint64_t before = std::numeric_limits<std::uint64_t>::max(),
                         const Check& check = {});

  [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }
  /// Damaged checkpoints of the run that open() has skipped.
  [[nodiscard]] const std::vector<std::filesystem::path>& skipped() const { return skipped_; }
  [[nodiscard]] const CheckpointFacts& facts() const { return facts_; }
  [[nodiscard]] bool portable() const { return portable_; }
  /// Number of ranks that wrote it or, if it is portable, its source.
  [[nodiscard]] std::uint64_t ranks() const { return ranks_; }
  [[nodiscard]] const std::vector<Block>& blocks() const { return blocks_; }
  [[nodiscard]] TileCounts tiles() const;
  /// identity_of() the adapters and the quantised base; null without.
  [[nodiscard]] const text::Json& adapters() const { return adapters_; }
  [[nodiscard]] const text::Json& quantization() const { return quantization_; }
  /// Returns all ranges of the checkpoint, like engine::whole_ranges().
  [[nodiscard]] std::vector<engine::StateRange> whole_ranges() const;
  [[nodiscard]] std::vector<std::filesystem::path> files() const;

  /// Compares every `of`-th state file, starting at number `first`, with its checksums. Calls
  /// `progress`, if given, with the size of each chunk. Throws Error(data) with the file and the
  /// offset.
  void verify(std::uint32_t first, std::uint32_t of,
              const std::function<void(Bytes)>& progress = {}) const;
  /// Throws Error(data) with the first difference if the states do not fit `blueprint`. Calls
  /// `check`, if given, after comparing the model and before comparing formats of states.
  void check_fits(const engine::Blueprint& blueprint, const Check& check = {}) const;

  /// Returns the states in the swap files of a rank, if any.
  [[nodiscard]] const engine::KeptStates& kept_by(std::uint32_t rank) const;
  /// Returns the extents of the same swap files that checkpoints of `run` up to this one keep.
  [[nodiscard]] state::KeptExtents kept_beside(const std::filesystem::path& run,
                                               std::uint32_t rank) const;

  /// Reads a range, from the files of whichever ranks wrote it: a source for Engine::resume().
  /// Throws Error(data), Error(io).
  void read(const engine::StateRange& range, HostBytes bytes) const;

 private:
  friend class CheckedStates;
  /// A file of states, or a segment of a swap file.
  struct StateFile {
    std::filesystem::path path;
    std::shared_ptr<const Descriptor> descriptor;
    Bytes begin = 0;  ///< in the file
    Bytes bytes = 0;
    std::vector<std::string> checksums;
  };
  struct Piece {
    engine::StateRange range;
    std::size_t file = 0;
    Bytes offset = 0;  ///< relative to its begin
  };
  void read_head();
  void add_rank(const std::string& checksum);
  void add_kept(const engine::KeptStates& kept);
  void add_portable_file(const text::Json& described);
  void open_states(const std::filesystem::path& path, const text::Json& described,
                   const std::filesystem::path& at);
  void add_piece(const engine::StateRange& range, Bytes offset, const std::filesystem::path& at);
  void check_complete();
  void check_head(const StateFile& file) const;
  void read_chunk(const StateFile& file, std::size_t index, std::vector<std::byte>& chunk) const;
  static void open_whole(std::optional<Checkpoint>& found, const std::filesystem::path& folder,
                         comm::Ranks* ranks);
  static Checkpoint find(const std::filesystem::path& run, const engine::Blueprint& blueprint,
                         comm::Ranks* ranks, std::uint64_t before, const Check& check);

  std::filesystem::path folder_;
  std::vector<std::filesystem::path> skipped_;
  CheckpointFacts facts_;
  bool portable_ = false;
  std::vector<engine::KeptStates> kept_;  ///< by rank
  std::uint64_t ranks_ = 0;
  std::vector<Block> blocks_;
  text::Json adapters_;
  text::Json quantization_;
  std::vector<StateFile> files_;  ///< by rank and segment; if portable, by block
  /// Pieces of each array by first entry, without gaps.
  std::map<std::pair<std::size_t, engine::StateKind>, std::vector<Piece>> pieces_;
};

/// Reads whole arrays of a checkpoint and compares every chunk with its checksum. Keeps one chunk
/// in memory.
class CheckedStates {
 public:
  /// `checkpoint` must outlive the object.
  explicit CheckedStates(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  /// Passes the bytes of `range`, one of Checkpoint::whole_ranges(), to `sink` in order, at most a
  /// chunk at a time. Throws Error(data) with the file and the offset, and exceptions of `sink`.
  void read(const engine::StateRange& range, const std::function<void(ConstHostBytes)>& sink);

 private:
  const Checkpoint& checkpoint_;
  std::vector<std::byte> chunk_;
  std::optional<std::pair<std::size_t, std::size_t>>
      held_;  ///< file and number of the chunk in memory
};

/// Returns the checkpoint `from`, or the latest one of the run directory `from`, whose states need
/// not be intact. Skips those that cannot be opened: a resume names them.
std::optional<Checkpoint> newest_readable(const std::filesystem::path& from);

/// Calls `work`, which reads the checkpoint `folder`, and appends advice_after_damage() to its
/// Error(data).
void with_restart_advice(const std::filesystem::path& folder, const std::function<void()>& work);

}  // namespace ballast::checkpoint
