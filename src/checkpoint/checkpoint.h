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
#include "ballast/core/descriptor.h"
#include "ballast/engine/engine.h"
#include "ballast/text/json.h"

namespace ballast::text {
class Json;
}

namespace ballast::checkpoint {

// A checkpoint is a folder `step-N` in the folder `checkpoints` of a run:
//   rank-R.states    rank R's ranges (engine::StateRange), one after the other, without gaps
//   rank-R.swap-P    rank R's swap file of path P, with the ranges on NVMe (checkpoint_swap.h)
//   rank-R.json      where they are, and the XXH3 of each MiB
//   checkpoint.json  what else the run needs to go on, and the XXH3 of each rank-R.json
// Both JSON files hold their own checksum. The folder is complete on the disk before it gets its
// name, so there is never a part of one.
//
// A portable checkpoint (export_states()) is a folder of any name:
//   block-B.safetensors  the whole arrays of a block, one tensor for each kind of state
//   checkpoint.json      the same, with "format": "portable", and the XXH3 of each MiB of the files

inline constexpr const char* kCheckpoints = "checkpoints";

/// A checkpoint to read, portable or not.
class Checkpoint {
 public:
  struct Block {
    std::string name;
    Elems elements = 0;
    /// Names of tensors that are not trained, without the block's prefix; they lie behind the
    /// others and have no states.
    std::vector<std::string> frozen = {};
    bool operator==(const Block&) const = default;
  };

  using Check = std::function<void(const Checkpoint&)>;

  /// What a checkpoint says of a block.
  [[nodiscard]] static Block describe(const model::BlockSpec& spec);
  [[nodiscard]] static text::Json json_of(const Block& block);

  /// Reads checkpoint.json and the rank-R.json, or the heads of the safetensors files. Throws
  /// Error(data) naming the file that is missing or damaged, Error(io) naming one that the system
  /// does not let it read.
  explicit Checkpoint(std::filesystem::path folder);
  ~Checkpoint();
  Checkpoint(Checkpoint&&) noexcept;

  /// The checkpoint `from`, verified, or the newest whole one of the run directory `from`, for a
  /// run with `blueprint`; of a run only those of fewer than `before` steps. Names damaged ones of
  /// a run in warnings and skips them. Collective. Throws Error(data) if there is none, or if it is
  /// of another model or other formats than the blueprint's; Error(io), for a run a JointError, if
  /// the system does not let it read one, since that is not damage.
  /// `check`, if given, is called with it when the model has been compared; it may throw.
  static Checkpoint open(const std::filesystem::path& from, const engine::Blueprint& blueprint,
                         comm::Ranks* ranks,
                         std::uint64_t before = std::numeric_limits<std::uint64_t>::max(),
                         const Check& check = {});

  [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }
  /// The damaged checkpoints of the run that open() has passed over.
  [[nodiscard]] const std::vector<std::filesystem::path>& skipped() const { return skipped_; }
  [[nodiscard]] const CheckpointFacts& facts() const { return facts_; }
  [[nodiscard]] bool portable() const { return portable_; }
  /// How many ranks have written it or, if it is portable, its source.
  [[nodiscard]] std::uint64_t ranks() const { return ranks_; }
  [[nodiscard]] const std::vector<Block>& blocks() const { return blocks_; }
  /// identity_of() of its adapters and of its quantised base; null without.
  [[nodiscard]] const text::Json& adapters() const { return adapters_; }
  [[nodiscard]] const text::Json& quantization() const { return quantization_; }
  /// What it holds, like engine::whole_ranges().
  [[nodiscard]] std::vector<engine::StateRange> whole_ranges() const;
  [[nodiscard]] std::vector<std::filesystem::path> files() const;

  /// Compares every `of`-th state file, from number `first` on, with its checksums. Calls
  /// `progress`, if given, with the bytes of each chunk. Throws Error(data) naming the file and the
  /// offset.
  void verify(std::uint32_t first, std::uint32_t of,
              const std::function<void(Bytes)>& progress = {}) const;
  /// Throws Error(data) naming the first difference if the states do not fit `blueprint`. Calls
  /// `check`, if given, after comparing the model and before comparing formats of states.
  void check_fits(const engine::Blueprint& blueprint, const Check& check = {}) const;

  /// What is in the swap files of a rank, if anything.
  [[nodiscard]] const engine::KeptStates& kept_by(std::uint32_t rank) const;
  /// What the checkpoints of `run` up to this one keep in the same swap files.
  [[nodiscard]] state::KeptExtents kept_beside(const std::filesystem::path& run,
                                               std::uint32_t rank) const;

  /// The bytes of a range, from whichever ranks have written them: a source for Engine::resume().
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
    Bytes offset = 0;  ///< after its begin
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
  std::vector<StateFile> files_;  ///< by rank and segment or, if it is portable, by block
  /// By first entry, without gaps.
  std::map<std::pair<std::size_t, engine::StateKind>, std::vector<Piece>> pieces_;
};

/// Reads whole arrays of a checkpoint and compares every chunk with its checksum. Keeps one chunk.
class CheckedStates {
 public:
  /// `checkpoint` must outlive the object.
  explicit CheckedStates(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  /// Passes the bytes of `range`, one of Checkpoint::whole_ranges(), to `sink` in their order, at
  /// most a chunk at a time. Throws Error(data) naming the file and the offset, and what `sink`
  /// throws.
  void read(const engine::StateRange& range, const std::function<void(ConstHostBytes)>& sink);

 private:
  const Checkpoint& checkpoint_;
  std::vector<std::byte> chunk_;
  std::optional<std::pair<std::size_t, std::size_t>> held_;  ///< file and number of the chunk
};

/// Calls `work`, which reads the checkpoint `folder`. Errors(data) that it throws then end with
/// advice_after_damage().
void with_restart_advice(const std::filesystem::path& folder, const std::function<void()>& work);

}  // namespace ballast::checkpoint
