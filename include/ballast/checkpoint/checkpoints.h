#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/engine/side_states.h"
#include "ballast/formats/export.h"

namespace ballast::checkpoint {

/// State of a dynamic loss scale (fp16.loss_scale 0).
struct LossScale {
  double scale = 1.0;
  std::uint64_t hysteresis = 1;  ///< number of overflows until the scale is halved
  std::uint64_t good_steps = 0;  ///< steps since the last overflow or the start

  bool operator==(const LossScale&) const = default;
};

/// Facts that a run needs to continue, in addition to its states.
struct CheckpointFacts {
  std::uint64_t step = 0;     ///< finished steps
  std::uint64_t updates = 0;  ///< finished steps that were not skipped
  std::uint64_t skipped_in_a_row = 0;
  std::uint64_t batch = 0;          ///< sequences per step, all ranks
  std::uint64_t length = 0;         ///< tokens per sequence
  std::uint64_t metrics_bytes = 0;  ///< size of metrics.jsonl
  /// Number of batches skipped so far: step k takes batch k + skipped_batches of the data.
  std::uint64_t skipped_batches = 0;
  std::vector<double> losses;           ///< losses of the last steps, for ballast.spike
  std::optional<LossScale> loss_scale;  ///< set if the scale is dynamic
  /// Settings that determine the results of the run (config::settings_of(), and the content of the
  /// training data): compact JSON by key. Empty if an older version wrote the checkpoint.
  std::map<std::string, std::string> settings;
  std::string arithmetic;  ///< engine::Engine::arithmetic(); "" if unknown
  /// engine::Engine::side_states(). CheckpointWriter sets it.
  engine::SideValues side_states = {};
};

/// Returns whether `path` denotes a checkpoint, complete or not: it has the name of a run's
/// checkpoint or contains checkpoint.json. Throws Error(io) if this cannot be determined.
bool names_checkpoint(const std::filesystem::path& path);
/// Returns the checkpoints step-N of the run directory `run`, newest first. Incomplete ones, and
/// damaged ones that a resume has set aside, have other names. Throws Error(io) if the folder of
/// checkpoints cannot be listed.
std::vector<std::filesystem::path> checkpoints_of(const std::filesystem::path& run);
/// Returns whether `path` is the run directory `run` or one of its checkpoints.
bool is_of_run(const std::filesystem::path& path, const std::filesystem::path& run);
/// Throws Error(data) unless `path` is a checkpoint or a run directory with checkpoints.
void check_names_states(const std::filesystem::path& path);

/// Numbers of tiles of a checkpoint's model.
struct TileCounts {
  std::uint64_t vocabulary = 1;
  std::uint64_t layers = 1;
};
/// Returns those of the checkpoint `from`, or of the latest readable one of the run directory
/// `from`; empty if there is none.
std::optional<TileCounts> tiles_of(const std::filesystem::path& from);

/// One kind of state (engine::StateKind), over all blocks.
struct KeptState {
  std::string kind;
  Bytes width = 0;  ///< bytes per entry
  Elems entries = 0;
  [[nodiscard]] Bytes bytes() const { return entries * width; }
};

struct CheckpointFile {
  std::filesystem::path path;
  Bytes bytes = 0;
};

/// Content of a checkpoint.
struct CheckpointContent {
  CheckpointFacts facts;
  bool portable = false;    ///< written by export_states()
  std::uint64_t ranks = 0;  ///< number of ranks that wrote it or, if it is portable, its source
  std::vector<KeptState> states;
  std::vector<CheckpointFile> files;
  [[nodiscard]] Bytes bytes() const;  ///< size of all files
};

/// Optional parts of examine_checkpoint().
struct CheckpointQuestions {
  bool whole = false;  ///< read every chunk and compare its checksum
  bool hash = false;   ///< also compute the hash of the states
};

struct CheckpointReport {
  std::filesystem::path folder;
  std::optional<CheckpointContent> content;  ///< empty if not even the facts can be read
  std::string damage;  ///< description of the damage with the file; "": none found
  /// Reason why the system cannot read it, which is not damage; "" if it can.
  std::string unreadable = {};
  /// XXH3 of all weights and states in the order of engine::whole_ranges(). It depends neither on
  /// the number of ranks that wrote the checkpoint nor on its form.
  std::optional<std::uint64_t> hash;

  /// Returns whether a run can resume from it.
  [[nodiscard]] bool usable() const { return damage.empty() && unreadable.empty(); }
};

/// Examines a checkpoint. Calls `progress` with the bytes read and the total; it may throw to stop.
CheckpointReport examine_checkpoint(const std::filesystem::path& folder,
                                    const CheckpointQuestions& questions,
                                    const std::function<void(Bytes done, Bytes total)>& progress);

/// Returns the end of a message about the damaged checkpoint `folder`: another checkpoint of its
/// run.
std::string advice_after_damage(const std::filesystem::path& folder);

/// Writes the states of `from`, a checkpoint or the latest complete one of a run directory, as a
/// portable checkpoint to the new folder `out`: checkpoint.json and a safetensors file per block,
/// with one tensor BLOCK.KIND ("layer.0.first_moments") per kind of state. Compares everything read
/// with its checksums. Calls `progress` like export_model(). Leaves nothing on failure. Throws
/// Error(data) with the damaged file; Error(usage) if `out` exists; Error(io).
formats::ExportSummary export_states(const std::filesystem::path& from,
                                     const std::filesystem::path& out,
                                     const std::function<void(Bytes done, Bytes total)>& progress);

}  // namespace ballast::checkpoint
