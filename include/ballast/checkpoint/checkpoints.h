#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/formats/export.h"

namespace ballast::checkpoint {

/// Where a dynamic loss scale is: fp16.loss_scale 0.
struct LossScale {
  double scale = 1.0;
  std::uint64_t hysteresis = 1;  ///< overflows, this one included, until the scale is halved
  std::uint64_t good_steps = 0;  ///< since the last overflow or the start

  bool operator==(const LossScale&) const = default;
};

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
  std::vector<double> losses;           ///< of the last steps, for ballast.spike
  std::optional<LossScale> loss_scale;  ///< if it is dynamic
  /// Settings that determine the results of the run (config::settings_of(), and the content of the
  /// training data): compact JSON by key. Empty if an older version has written the checkpoint.
  std::map<std::string, std::string> settings;
  std::string arithmetic;  ///< engine::Engine::arithmetic(); "" if it is not known
};

/// Whether `path` is meant as a checkpoint, whole or not: it has the name of one of a run or a
/// checkpoint.json. Throws Error(io) if the system does not say.
bool names_checkpoint(const std::filesystem::path& path);
/// The checkpoints step-N of the run directory `run`, the newest first; incomplete ones, and
/// damaged ones that a resume has passed over, have other names. Throws Error(io) if there is a
/// folder of checkpoints that cannot be listed.
std::vector<std::filesystem::path> checkpoints_of(const std::filesystem::path& run);
/// Whether `path` is the run directory `run` or one of its checkpoints.
bool is_of_run(const std::filesystem::path& path, const std::filesystem::path& run);
/// Throws Error(data) unless `path` is a checkpoint or a run directory with checkpoints.
void check_names_states(const std::filesystem::path& path);

/// One kind of state (engine::StateKind) of all blocks.
struct KeptState {
  std::string kind;
  Bytes width = 0;  ///< bytes of an entry
  Elems entries = 0;
  [[nodiscard]] Bytes bytes() const { return entries * width; }
};

struct CheckpointFile {
  std::filesystem::path path;
  Bytes bytes = 0;
};

/// What a checkpoint holds.
struct CheckpointContent {
  CheckpointFacts facts;
  bool portable = false;    ///< written by export_states()
  std::uint64_t ranks = 0;  ///< that have written it; of a portable one: its source
  std::vector<KeptState> states;
  std::vector<CheckpointFile> files;
  [[nodiscard]] Bytes bytes() const;  ///< of all files
};

/// What examine_checkpoint() reads of it.
struct CheckpointQuestions {
  bool whole = false;  ///< every chunk of its files, to compare it with its checksum
  bool hash = false;   ///< the same, for the hash of its states
};

struct CheckpointReport {
  std::filesystem::path folder;
  std::optional<CheckpointContent> content;  ///< empty if not even this can be read
  std::string damage;                        ///< names the file; "": none was found
  /// Why the system does not let it be read, which is not damage; "": it does.
  std::string unreadable = {};
  /// XXH3 of all weights and states in the order of engine::whole_ranges(): does not depend on the
  /// number of ranks that have written it, nor on its form.
  std::optional<std::uint64_t> hash;

  /// Whether nothing speaks against a resume from it.
  [[nodiscard]] bool usable() const { return damage.empty() && unreadable.empty(); }
};

/// Calls `progress` with the bytes that are read and those of the whole; it may throw to stop.
CheckpointReport examine_checkpoint(const std::filesystem::path& folder,
                                    const CheckpointQuestions& questions,
                                    const std::function<void(Bytes done, Bytes total)>& progress);

/// The end of a message about the damaged checkpoint `folder`: which other one its run has.
std::string advice_after_damage(const std::filesystem::path& folder);

/// Writes the states of `from`, a checkpoint or a run directory (its newest whole one), as a
/// portable checkpoint to the new folder `out`: checkpoint.json and a safetensors file for each
/// block, with one tensor per kind of state, named BLOCK.KIND ("layer.0.first_moments"). Compares
/// all that it reads with the checksums. Calls `progress` like export_model(); a failure leaves
/// nothing. Throws Error(data) naming the damaged file; Error(usage) if `out` exists; Error(io).
formats::ExportSummary export_states(const std::filesystem::path& from,
                                     const std::filesystem::path& out,
                                     const std::function<void(Bytes done, Bytes total)>& progress);

}  // namespace ballast::checkpoint
