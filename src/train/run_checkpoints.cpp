#include "src/train/run_checkpoints.h"

#include <algorithm>
#include <array>
#include <bit>
#include <filesystem>
#include <new>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/comm/agreement.h"
#include "ballast/config/key_effects.h"
#include "ballast/core/error.h"
#include "ballast/model/block_layout.h"
#include "ballast/setup/run_plan.h"
#include "ballast/setup/setup.h"
#include "ballast/state/store.h"
#include "ballast/state/swap_plan.h"

#include "src/checkpoint/checkpoint.h"
#include "src/checkpoint/format.h"
#include "src/checkpoint/kept_checkpoints.h"
#include "src/checkpoint/owner.h"
#include "src/train/initial_weights.h"
#include "src/train/run_inputs.h"

namespace ballast::train {

namespace {

namespace fs = std::filesystem;

/// `own`: the checkpoint is from the resumed run. The position in the data follows from step and
/// batch.
void check_resumable(const checkpoint::Checkpoint& from, const config::Config& config, bool own) {
  const checkpoint::CheckpointFacts& facts = from.facts();
  const auto refuse = [&](const std::string& what) {
    throw Error(ErrorCategory::config, fmt::format("{}: {}", from.folder().string(), what));
  };
  const std::uint64_t batch = config.batch.train_batch;
  const std::uint64_t length = config.data.sequence_length;
  if (facts.batch != batch || facts.length != length) {
    refuse(
        fmt::format("has steps of {} sequences of {} tokens, but the config of {} of {}; set "
                    "train_batch_size and data.sequence_length to those of the checkpoint",
                    facts.batch, facts.length, batch, length));
  }
  // A run that was killed after its last step may not have saved its weights yet.
  const RunEnd end(config);
  if (end.is_reached_by(facts.step) && !(own && end.is_last(facts.step))) {
    refuse(fmt::format("has {} finished steps, but the run only {}; give more with --steps",
                       facts.step, end.steps()));
  }
}

/// Returns the settings of `from` that the run changes. Throws Error(config) if a change is not
/// allowed.
std::vector<config::SettingChange> compare_settings(const checkpoint::Checkpoint& from,
                                                    const SettingsCheck& check, bool first) {
  const config::Settings& before = from.facts().settings;
  if (before.empty()) {
    if (!first) return {};
    log(LogLevel::info,
        fmt::format("{}: an older version has written it without the settings of its run, so they "
                    "are not compared with the config",
                    from.folder().string()));
    return {};
  }
  const std::vector<config::SettingChange> changes = config::find_changes(before, check.settings);
  config::refuse_changes(changes, check.allowed, from.folder().string());
  for (const config::SettingChange& change : changes) {
    if (!first) break;
    log(LogLevel::info, fmt::format("{}: the run changes {}, as --allow-change permits",
                                    from.folder().string(), change.text()));
  }
  return changes;
}

/// Logs that the rest of the run may differ in bits from a run that was never stopped.
void note_other_arithmetic(const checkpoint::Checkpoint& from, const engine::Engine& engine) {
  const std::string& before = from.facts().arithmetic;
  const std::string now = engine.arithmetic();
  if (engine.blueprint().mesh.rank != 0 || before.empty() || before == now) return;
  log(LogLevel::info,
      fmt::format("{}: computed with {}; this run computes with {}, so its losses and weights are "
                  "close to those of a run that was never stopped, but may differ in their last "
                  "bits",
                  from.folder().string(), before, now));
}

/// Prepares the checkpoints of a run that continues from `from`: renames damaged ones, so that all
/// others are complete and count, and removes remains of killed processes.
void tidy_checkpoints(const checkpoint::Checkpoint& from, const config::Config& config) {
  const fs::path& run = config.ballast.out;
  const std::uint64_t step = from.facts().step;
  std::vector<fs::path> damaged = from.skipped();
  for (const fs::path& folder : checkpoint::checkpoints_of(run)) {
    if (checkpoint::step_of(folder) >= step) continue;
    try {
      const checkpoint::Checkpoint older(folder);
    } catch (const Error& error) {
      if (error.category() != ErrorCategory::data) {
        throw Error(error.category(),
                    fmt::format("{}, or move it out of the run directory", error.what()));
      }
      log(LogLevel::warning, fmt::format("an older checkpoint is damaged: {}", error.what()));
      damaged.push_back(folder);
    }
  }
  for (const fs::path& folder : damaged) {
    const fs::path aside = checkpoint::set_aside(folder);
    log(LogLevel::info,
        fmt::format("{} is damaged and now called {}, without its states on NVMe; remove it when "
                    "you no longer need it",
                    folder.string(), aside.filename().string()));
  }
  checkpoint::remove_incomplete(run / checkpoint::kCheckpoints);
  // A killed run may have left one checkpoint more than there are extents for.
  checkpoint::remove_older(run, checkpoint::checkpoint_folder(run, step),
                           config.ballast.checkpoint_keep);
  for (const auto& path : setup::engine_options(config, {}).swap.paths) {
    checkpoint::remove_left_names(run, path.directory);
  }
}

/// Tidies up if this is the `own` run. Returns the extents that its checkpoints keep in the swap
/// files, if these are `reusable`. Collective. A checkpoint that cannot be read is not a failure of
/// the engine, for which a run would go back again.
state::KeptExtents tidy_up(const checkpoint::Checkpoint& from, const config::Config& config,
                           comm::Ranks* ranks, bool own, bool reusable) {
  const std::uint32_t rank = ranks == nullptr ? 0 : ranks->rank();
  state::KeptExtents beside;
  try {
    comm::collective_try(ranks, [&] {
      if (own && rank == 0) tidy_checkpoints(from, config);
    });
    comm::collective_try(ranks, [&] {
      if (reusable) beside = from.kept_beside(config.ballast.out, rank);
    });
  } catch (const Error& error) {
    if (error.category() != ErrorCategory::io) throw;
    throw comm::JointError(ErrorCategory::io, error.what());
  }
  return beside;
}

/// Returns whether the swap files of the checkpoint belong to this run, on all ranks. Those of
/// another run stay unchanged. Collective.
bool all_may_write(const checkpoint::Checkpoint& from, const config::Config& config,
                   comm::Ranks* ranks) {
  const std::uint32_t rank = ranks == nullptr ? 0 : ranks->rank();
  const bool may = checkpoint::may_write_to(from.kept_by(rank), config.ballast.out);
  if (ranks == nullptr) return may;
  const std::array own = {static_cast<std::byte>(may)};
  std::vector<std::byte> all(ranks->world());
  ranks->all_gather(own, all);
  return std::find(all.begin(), all.end(), std::byte{0}) == all.end();
}

/// Compares the states in swap files with their checksums after they were copied, because a run to
/// which these files belong may have overwritten them in the meantime. Collective.
void verify_again(const checkpoint::Checkpoint& from, comm::Ranks* ranks) {
  bool in_swap_files = false;
  for (std::uint32_t r = 0; r < from.ranks() && !from.portable(); ++r) {
    in_swap_files = in_swap_files || !from.kept_by(r).homes.empty();
  }
  if (!in_swap_files) return;
  comm::collective_try(ranks, [&] {
    checkpoint::with_restart_advice(from.folder(), [&] {
      from.verify(ranks == nullptr ? 0 : ranks->rank(), ranks == nullptr ? 1 : ranks->world());
    });
  });
}

/// Refuses the weights of a run that has diverged.
void check_finite(const checkpoint::Checkpoint& from, const engine::Blueprint& blueprint,
                  const engine::StateRange& range, ConstHostBytes bytes) {
  if (range.kind != engine::StateKind::weights) return;
  const std::optional<Elems> bad = first_not_finite(bytes, blueprint.type);
  if (!bad) return;
  const auto blocks = model::whole_blocks(blueprint.model);
  const auto& tensors = blocks.at(range.block).tensors;
  const Elems at = range.first + *bad;
  const auto of = std::find_if(tensors.begin(), tensors.end(), [&](const model::TensorSpec& one) {
    return !one.quantized && one.offset <= at && at < one.offset + one.size;
  });
  const bool found = of != tensors.end();
  throw Error(ErrorCategory::data,
              fmt::format("{}: {}", from.folder().string(),
                          explain_not_finite(found ? of->name : blocks.at(range.block).name, bytes,
                                             blueprint.type, *bad,
                                             range.first - (found ? of->offset : 0))));
}

}  // namespace

ResumedRun resume_run(engine::Engine& engine, const config::Config& config,
                      const std::filesystem::path& from, comm::Ranks* ranks, std::uint64_t before,
                      const std::function<void(const ResumedRun&)>& found,
                      const SettingsCheck* check) {
  std::vector<config::SettingChange> changes;
  checkpoint::Checkpoint::Check compare;
  if (check != nullptr) {
    compare = [&](const checkpoint::Checkpoint& one) {
      changes = compare_settings(one, *check, engine.blueprint().mesh.rank == 0);
    };
  }
  comm::collective_try(ranks, [&] {
    if (engine.blueprint().mesh.rank == 0)
      checkpoint::refuse_foreign_checkpoints(config.ballast.out);
  });
  const checkpoint::Checkpoint states =
      checkpoint::Checkpoint::open(from, engine.blueprint(), ranks, before, compare);
  std::vector<comm::Identity> files;
  comm::collective_try(ranks, [&] {
    if (ranks != nullptr) files = compared_files(states);
  });
  comm::require_agreement(ranks, files);
  const bool own = checkpoint::is_of_run(states.folder(), config.ballast.out);
  check_resumable(states, config, own);
  ResumedRun resumed = {states.facts(), states.folder(), std::move(changes)};
  if (found) found(resumed);
  const std::uint32_t rank = engine.blueprint().mesh.rank;
  const bool fits = own && states.ranks() == engine.blueprint().mesh.ranks();
  const bool reusable = fits && all_may_write(states, config, ranks);
  const state::KeptExtents beside = tidy_up(states, config, ranks, own, reusable);
  const bool reused = engine.resume(
      [&](const engine::StateRange& range, HostBytes bytes) {
        checkpoint::with_restart_advice(states.folder(), [&] {
          states.read(range, bytes);
          check_finite(states, engine.blueprint(), range, bytes);
        });
      },
      states.facts().updates, reusable ? states.kept_by(rank) : engine::KeptStates{}, beside,
      states.facts().side_states);
  if (!reused) verify_again(states, ranks);
  // The warm-up has settled the kernels.
  note_other_arithmetic(states, engine);
  if (rank == 0 && own && !reused && !states.kept_by(0).homes.empty()) {
    log(LogLevel::info,
        fmt::format("{}: its states on NVMe were copied to new swap files, since {}",
                    states.folder().string(),
                    reusable || !fits
                        ? "ranks, placement, nvme_path or "
                          "ballast.checkpoint_keep differ"
                        : checkpoint::why_not_own(states.kept_by(0), config.ballast.out)));
  }
  return resumed;
}

std::filesystem::path resumed_from(const config::Config& config, const RunOptions& options) {
  const bool own = options.directory == RunDirectory::continued && options.resume.empty();
  return own ? config.ballast.out : options.resume;
}

void check_room_for_checkpoints(const engine::Engine& engine, const config::Config& config,
                                comm::Ranks* ranks, bool new_swap_files) {
  if (engine.blueprint().mesh.rank != 0 || !RunCheckpoints::wanted(config)) return;
  const fs::path& run = config.ballast.out;
  const std::uint64_t keep = config.ballast.checkpoint_keep;
  const comm::Launch launch = ranks == nullptr ? comm::Launch{} : ranks->launch();
  std::error_code error;
  const fs::space_info space = fs::space(run, error);
  if (error) return;
  Bytes each = 0;
  for (const auto& range : engine::saved_ranges(engine.blueprint(), step::kHomesInMemory))
    each += range.bytes();
  each *= engine.blueprint().mesh.ranks();
  const std::uint64_t more =
      keep + 1 - std::min<std::uint64_t>(keep, checkpoint::checkpoints_of(run).size());
  const std::vector<Bytes> extents = state::swap_extents(engine.blueprint().schedule);
  Bytes swap = 0;
  if (new_swap_files && !extents.empty()) {
    const auto options = setup::engine_options(config, launch).swap;
    swap = std::max(1U, launch.local_world) * state::swap_bytes_on(run, options, extents);
  }
  if (space.available >= swap && (space.available - swap) / more >= each) return;
  throw Error(
      ErrorCategory::io,
      fmt::format("ballast.checkpoint_every: {} has {} free, but {} checkpoints of {} need more "
                  "while one is written{}; make room, choose another run directory with --out, or "
                  "set ballast.checkpoint_keep to less",
                  run.string(), format_bytes(space.available), keep + 1, format_bytes(each),
                  swap == 0 ? ""
                            : fmt::format(", in addition to swap files of {} on the same file "
                                          "system",
                                          format_bytes(swap))));
}

bool RunCheckpoints::time_is_up() {
  const double between = config_.ballast.checkpoint_seconds;
  if (between == 0.0 || engine_.blueprint().mesh.rank != 0) return false;
  const auto now = std::chrono::steady_clock::now();
  if (!since_) since_ = now;
  return std::chrono::duration<double>(now - *since_).count() >= between;
}

/// The ranks agree, because a signal may reach them before and after the same step, and clocks
/// differ.
RunCheckpoints::Requests RunCheckpoints::requests() {
  const bool stop = stop_ != nullptr && stop_->load();
  const bool asked = now_ != nullptr && now_->exchange(false);
  const bool now = time_is_up() || asked;
  const bool written = !writer_ || writer_->written();
  if (ranks_ == nullptr) return {stop, now, written};
  const std::array own = {static_cast<std::byte>(stop), static_cast<std::byte>(now),
                          static_cast<std::byte>(written)};
  std::vector<std::byte> all(own.size() * ranks_->world());
  ranks_->all_gather(own, all);
  Requests any;
  for (std::size_t i = 0; i < all.size(); i += own.size()) {
    any.stop = any.stop || all[i] != std::byte{0};
    any.now = any.now || all[i + 1] != std::byte{0};
    any.written = any.written && all[i + 2] != std::byte{0};
  }
  return any;
}

RunCheckpoints::Done RunCheckpoints::after_step(
    std::uint64_t step, const std::function<checkpoint::CheckpointFacts()>& facts) {
  if (!wanted(config_)) return {};
  const Requests asked = requests();
  const std::uint64_t every = config_.ballast.checkpoint_every;
  const bool last = RunEnd(config_).is_last(step);
  const bool due = last || (every > 0 && step % every == 0) || asked.now || asked.stop;
  Done done = {.stops = asked.stop, .began = due};
  const After after = asked.stop ? After::stop : last ? After::last_step : After::training;
  // That of this step follows the one in the background.
  const bool more = last || asked.stop;
  if (asked.written || due) done.wrote = settle(more ? After::checkpoint : after);
  if (due) {
    begin(facts(), after);
    since_ = std::chrono::steady_clock::now();
    const bool now = last || asked.stop || (writer_ && !writer_->in_background());
    if (now) done.wrote = settle(after) || done.wrote;
  }
  return done;
}

void RunCheckpoints::begin(const checkpoint::CheckpointFacts& facts, After after) {
  as_step_failure([&] { engine_->finish(); });  // its errors are not the checkpoint's
  const bool began = attempt(facts.step, after, [&] {
    writer_.emplace(*engine_, config_.ballast.out, facts, config_.ballast.checkpoint_keep, ranks_);
  });
  if (!began) writer_.reset();
}

bool RunCheckpoints::settle(After after) {
  if (!writer_) return false;
  const std::uint64_t step = writer_->facts().step;
  const bool written = attempt(step, after, [&] { newest_ = writer_->publish(); });
  writer_.reset();
  if (!written) return false;
  newest_step_ = step;
  failures_ = 0;
  return true;
}

template <class Work>
bool RunCheckpoints::attempt(std::uint64_t step, After after, Work work) {
  const bool stopping = after == After::stop;
  try {
    work();
    return true;
  } catch (const Error& error) {
    const ErrorCategory category = error.category();
    if (category == ErrorCategory::state) as_step_failure([&]() -> void { throw; });
    const bool may_go_on = category == ErrorCategory::io || category == ErrorCategory::memory;
    // The other ranks do not see an error of this rank alone, and would wait for it.
    const bool alone =
        ranks_ != nullptr && dynamic_cast<const comm::JointError*>(&error) == nullptr;
    if (!may_go_on || stopping || alone) throw;
    fail(step, after, error.what());
  } catch (const std::bad_alloc&) {
    if (stopping || ranks_ != nullptr) throw;
    fail(step, after, "out of memory");
  }
  return false;
}

void RunCheckpoints::fail(std::uint64_t step, After after, const std::string& why) {
  const bool said = std::has_single_bit(++failures_) || after == After::last_step;
  if (!said || engine_.blueprint().mesh.rank != 0) return;
  log(LogLevel::warning,
      fmt::format("step {}: no checkpoint: {}; {}{}", step, why,
                  newest_.empty() ? "there is none of this run yet"
                                  : fmt::format("the latest is {}", newest_.string()),
                  after == After::training ? ", and training continues" : ""));
}

namespace {

bool lacks_pad_token(const std::filesystem::path& from) {
  const auto found = checkpoint::newest_readable(from);
  return found && !found->facts().settings.contains(config::kPadTokenSetting);
}

}  // namespace

config::Config with_pad_token_of_checkpoint(const config::Config& config, const RunOptions& options,
                                            comm::Ranks* ranks) {
  const auto token = model::pad_token(config.model);
  const std::filesystem::path from = resumed_from(config, options);
  if (!token || from.empty() ||
      config::is_allowed(config::kPadTokenSetting, options.allowed_changes)) {
    return config;
  }
  const bool root = ranks == nullptr || ranks->rank() == 0;
  bool lacks = false;
  comm::collective_try(ranks, [&] { lacks = root && lacks_pad_token(from); });
  if (!comm::decided_by_root(ranks, lacks)) return config;
  if (root) {
    log(LogLevel::info,
        fmt::format("{}: was written without {}, so the run continues to train the row of token {} "
                    "in the embedding; --allow-change {} ends that",
                    from.string(), config::kPadTokenSetting, *token, config::kPadTokenSetting));
  }
  config::Config changed = config;
  changed.model.details[model::kPadToken] = {};
  return changed;
}

config::Config settle_tiles(const config::Config& config, comm::Ranks* ranks,
                            const std::atomic<bool>* interrupted, const RunOptions& options) {
  const std::filesystem::path from = resumed_from(config, options);
  if (!config.open_tiles.any() || from.empty()) {
    return setup::settle_tiles(config, ranks, interrupted, options.source);
  }
  config::Config settled = config;
  bool found = false;
  comm::collective_try(ranks, [&] {
    if (ranks != nullptr && ranks->rank() != 0) return;
    const auto tiles = checkpoint::tiles_of(from);
    found = tiles.has_value();
    if (!found) return;
    if (config.open_tiles.vocabulary) settled.model.vocabulary_tiles = tiles->vocabulary;
    if (config.open_tiles.layers) settled.model.layer_tiles = tiles->layers;
  });
  if (comm::decided_by_root(ranks, found)) return setup::with_tiles_of_root(settled, ranks);
  return setup::settle_tiles(config, ranks, interrupted, options.source);
}

}  // namespace ballast::train
