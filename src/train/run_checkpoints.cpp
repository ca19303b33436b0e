#include "src/train/run_checkpoints.h"

#include <array>
#include <bit>
#include <span>
#include <vector>

#include <fmt/format.h>

#include "ballast/comm/together.h"
#include "ballast/core/error.h"
#include "ballast/core/log.h"

#include "src/train/checkpoint_swap.h"

namespace ballast::train {
namespace {

/// The position in the data follows from the step and the batch.
void check_resumable(const Checkpoint& from, const config::Config& config) {
  const CheckpointFacts& facts = from.facts();
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
  // Of the last step: a run that was killed then has yet to save its weights.
  if (facts.step > config.ballast.steps) {
    refuse(
        fmt::format("is beyond the run's {} steps; give more with --steps", config.ballast.steps));
  }
}

}  // namespace

Resumed resume_run(engine::Engine& engine, const config::Config& config, comm::Ranks* ranks) {
  const Checkpoint from = Checkpoint::find(config.ballast.out, engine.blueprint(), ranks);
  check_resumable(from, config);
  const std::uint32_t rank = engine.blueprint().rank;
  // A run that was killed may have left parts of one, and one more than there are extents for.
  comm::together(ranks, [&] {
    if (rank != 0) return;
    remove_incomplete(config.ballast.out / kCheckpoints);
    remove_older(config.ballast.out, from.folder(), config.ballast.checkpoint_keep);
  });
  const bool same_world = from.ranks() == engine.blueprint().workload.world;
  const engine::KeptStates here = same_world ? from.kept_by(rank) : engine::KeptStates{};
  const bool reused = engine.resume(
      [&from](const engine::StateRange& range, HostBytes bytes) { from.read(range, bytes); },
      from.facts().updates, here,
      same_world ? from.kept_beside(config.ballast.out, rank) : state::KeptExtents{});
  if (rank == 0 && !reused && !from.kept_by(0).homes.empty()) {
    log(LogLevel::info,
        fmt::format("{}: its states on NVMe were copied to new swap files, since ranks, placement, "
                    "nvme_path or ballast.checkpoint_keep differ",
                    from.folder().string()));
  }
  return {from.facts(), from.folder()};
}

/// Ranks may get a signal before and after the same step, so they agree.
RunCheckpoints::Requests RunCheckpoints::requests() const {
  const bool stop = stop_ != nullptr && stop_->load();
  const bool now = now_ != nullptr && now_->exchange(false);
  if (ranks_ == nullptr) return {stop, now};
  const std::array own = {static_cast<std::byte>(stop), static_cast<std::byte>(now)};
  std::vector<std::byte> all(own.size() * ranks_->world());
  ranks_->all_gather(own, all);
  Requests any;
  for (std::size_t i = 0; i < all.size(); i += own.size()) {
    any.stop = any.stop || all[i] != std::byte{0};
    any.now = any.now || all[i + 1] != std::byte{0};
  }
  return any;
}

bool RunCheckpoints::after_step(std::uint64_t step, const std::function<CheckpointFacts()>& facts) {
  if (!wanted(config_)) return false;
  const Requests asked = requests();
  const bool due = step % config_.ballast.checkpoint_every == 0 || step == config_.ballast.steps;
  if (due || asked.now || asked.stop) write(facts(), asked.stop);
  return asked.stop;
}

void RunCheckpoints::write(const CheckpointFacts& facts, bool stopping) {
  try {
    newest_ = write_checkpoint(engine_, config_.ballast.out, facts, config_.ballast.checkpoint_keep,
                               ranks_);
    ++written_;
    failures_ = 0;
  } catch (const Error& error) {
    if (error.category() != ErrorCategory::io || stopping) throw;
    if (!std::has_single_bit(++failures_) || engine_.blueprint().rank != 0) return;
    log(LogLevel::warning,
        fmt::format("step {}: no checkpoint: {}; {}, and training goes on", facts.step,
                    error.what(),
                    newest_.empty() ? "there is none of this run yet"
                                    : fmt::format("the newest is {}", newest_.string())));
  }
}

}  // namespace ballast::train
