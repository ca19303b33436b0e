#include <algorithm>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/comm/agreement.h"
#include "ballast/core/error.h"

#include "src/checkpoint/checkpoint.h"
#include "src/checkpoint/format.h"
#include "src/checkpoint/kept_checkpoints.h"

// Finds the latest complete checkpoint of a run, and what the others keep.

namespace ballast::checkpoint {
namespace {

namespace fs = std::filesystem;

/// Returns checkpoints_of(run) as seen by rank 0, for all ranks. They open checkpoints together,
/// and a shared file system may show different lists while one is being written.
std::vector<fs::path> checkpoints_for_all(const fs::path& run, comm::Ranks* ranks) {
  std::vector<fs::path> folders;
  comm::collective_try(ranks, [&] { folders = checkpoints_of(run); });
  if (ranks == nullptr) return folders;
  std::string names;
  for (const fs::path& folder : folders) names += folder.filename().string() + '\n';
  std::istringstream lines(ranks->broadcast(names));
  folders.clear();
  for (std::string name; std::getline(lines, name);) folders.push_back(run / kCheckpoints / name);
  return folders;
}

/// `latest`: the latest checkpoint. `damaged`: the problem of each.
[[noreturn]] void refuse_without_whole(const fs::path& run, const fs::path& latest,
                                       const std::vector<std::string>& damaged) {
  if (damaged.empty()) {
    throw Error(ErrorCategory::data,
                fmt::format("{} has no complete checkpoint to resume from; a run writes them with "
                            "ballast.checkpoint_every",
                            run.string()));
  }
  const std::string which = damaged.size() == 1 ? "its only checkpoint is damaged"
                                                : fmt::format("all {} are damaged", damaged.size());
  throw Error(
      ErrorCategory::data,
      fmt::format("{} has no complete checkpoint to resume from; {}, and nothing was changed; "
                  "the latest: {}{}",
                  run.string(), which, damaged.front(), advice_for_copy(latest)));
}

}  // namespace

void with_restart_advice(const fs::path& folder, const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    if (error.category() != ErrorCategory::data) throw;
    throw Error(ErrorCategory::data, error.what() + advice_after_damage(folder));
  }
}

Checkpoint Checkpoint::open(const fs::path& from, const engine::Blueprint& blueprint,
                            comm::Ranks* ranks, std::uint64_t before, const Check& check) {
  bool named = false;
  comm::collective_try(ranks, [&] {
    if (ranks == nullptr || ranks->rank() == 0) named = names_checkpoint(from);
  });
  if (!comm::decided_by_root(ranks, named)) return find(from, blueprint, ranks, before, check);
  std::optional<Checkpoint> found;
  comm::collective_try(ranks,
                       [&] { with_restart_advice(from, [&] { open_whole(found, from, ranks); }); });
  comm::collective_try(ranks, [&] { found->check_fits(blueprint, check); });
  return std::move(*found);
}

/// Each rank verifies its share. A system error is not damage, so it does not skip a checkpoint.
void Checkpoint::open_whole(std::optional<Checkpoint>& found, const fs::path& folder,
                            comm::Ranks* ranks) {
  try {
    found.emplace(folder);
    found->verify(ranks == nullptr ? 0 : ranks->rank(), ranks == nullptr ? 1 : ranks->world());
  } catch (const Error& error) {
    if (error.category() != ErrorCategory::io) throw;
    throw Error(ErrorCategory::io, error.what() + advice_after_damage(folder));
  }
}

state::KeptExtents Checkpoint::kept_beside(const fs::path& run, std::uint32_t rank) const {
  state::KeptExtents all;
  const engine::KeptStates& here = kept_by(rank);
  if (here.homes.empty()) return all;
  const auto same_file = [](const fs::path& a, const fs::path& b) {
    std::error_code error;
    return fs::equivalent(a, b, error);
  };
  for (const fs::path& folder : checkpoints_of(run)) {
    try {
      if (step_of(folder) > facts_.step) continue;
      const Checkpoint other(folder);
      if (other.facts_.step > facts_.step || rank >= other.kept_.size()) continue;
      const engine::KeptStates& kept = other.kept_by(rank);
      const bool same = !kept.homes.empty() &&
                        std::equal(kept.image.files.begin(), kept.image.files.end(),
                                   here.image.files.begin(), here.image.files.end(), same_file);
      if (!same) continue;
      for (const engine::KeptHome& home : kept.homes) {
        all[other.facts_.step].push_back(home.content.extent);
      }
    } catch (const Error& error) {
      if (error.category() != ErrorCategory::data) throw;  // it may keep extents
    }
  }
  return all;
}

Checkpoint Checkpoint::find(const fs::path& run, const engine::Blueprint& blueprint,
                            comm::Ranks* ranks, std::uint64_t before, const Check& check) {
  const bool is_root = ranks == nullptr || ranks->rank() == 0;
  std::vector<std::string> damaged;
  std::vector<fs::path> skipped;
  for (const fs::path& folder : checkpoints_for_all(run, ranks)) {
    std::optional<Checkpoint> found;
    try {
      comm::collective_try(ranks, [&] { open_whole(found, folder, ranks); });
    } catch (const Error& error) {
      // The engine is not involved, so a run does not go back because of it.
      if (error.category() == ErrorCategory::io) {
        throw comm::JointError(ErrorCategory::io, error.what());
      }
      if (error.category() != ErrorCategory::data) throw;
      damaged.emplace_back(error.what());
      skipped.push_back(folder);
      continue;
    }
    if (found->facts().step >= before) continue;
    for (const std::string& what : damaged) {
      if (is_root) log(LogLevel::warning, "skipped a checkpoint: " + what);
    }
    comm::collective_try(ranks, [&] { found->check_fits(blueprint, check); });
    found->skipped_ = std::move(skipped);
    return std::move(*found);
  }
  refuse_without_whole(run, skipped.empty() ? fs::path() : skipped.front(), damaged);
}

}  // namespace ballast::checkpoint
