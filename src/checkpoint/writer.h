#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/engine/engine.h"
#include "ballast/engine/snapshot.h"
#include "ballast/text/json.h"

#include "src/checkpoint/checkpoint.h"
#include "src/formats/write_behind.h"

namespace ballast::checkpoint {

/// Writes a file of a checkpoint in order and computes the checksums of its chunks.
class StatesWriter {
 public:
  /// Creates a file of `size` bytes. Throws like WriteBehind.
  StatesWriter(const std::filesystem::path& path, Bytes size);

  void write(ConstHostBytes bytes);
  /// Waits until everything is on the disk, and returns the checksums (checksum_text()).
  text::Json finish();

 private:
  void pass_on();

  formats::WriteBehind file_;
  Bytes written_ = 0;  ///< without the current chunk
  std::vector<std::byte> chunk_;
  text::Json checksums_ = text::Json::array();
};

/// A checkpoint of an engine that is being written to a run directory. States in host memory are
/// written while training continues; an update waits until its block is written. The checkpoint
/// exists only after publish(). All members except written() are collective: all `ranks` (nullptr:
/// one) must see the same folder, end a checkpoint at the same step, and end one before they begin
/// the next.
class CheckpointWriter {
 public:
  /// Waits for all updates and begins. `keep`: number of checkpoints that remain when publish()
  /// removes the oldest. `engine` must outlive the object. Throws Error(io), for example if the
  /// disk is full, and leaves nothing.
  CheckpointWriter(engine::Engine& engine, std::filesystem::path run, CheckpointFacts facts,
                   std::uint64_t keep, comm::Ranks* ranks);
  /// Without publish(), leaves nothing.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// Returns whether training may continue before publish(): see step::written_in_background().
  [[nodiscard]] bool in_background() const;
  /// Returns whether this rank's states are on the disk, or writing them has failed.
  [[nodiscard]] bool written() const;
  /// Waits for the rest. Returns the new folder. Throws like the constructor.
  std::filesystem::path publish();

  [[nodiscard]] const CheckpointFacts& facts() const { return facts_; }

 private:
  void make_folder();
  void start_own();
  std::uint64_t finish_own();
  void give_up() noexcept;

  engine::Engine& engine_;
  std::filesystem::path run_;
  std::filesystem::path folder_;
  CheckpointFacts facts_;
  std::uint64_t keep_;
  comm::Ranks* ranks_;
  bool first_;
  bool published_ = false;
  engine::KeptStates kept_;                 ///< states on NVMe
  std::vector<engine::StateRange> ranges_;  ///< ranges in rank-R.states
  std::optional<StatesWriter> states_;
  text::Json chunks_;  ///< checksums of its chunks
  std::shared_ptr<engine::BackgroundSave> saving_;
};

}  // namespace ballast::checkpoint
