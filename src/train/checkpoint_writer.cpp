#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "ballast/comm/together.h"
#include "ballast/core/error.h"
#include "ballast/state/checksum.h"
#include "ballast/text/files.h"

#include "src/train/checkpoint.h"
#include "src/train/checkpoint_format.h"
#include "src/train/checkpoint_swap.h"
#include "src/train/states_writer.h"

namespace ballast::train {
namespace {

namespace fs = std::filesystem;
using text::Json;

Bytes bytes_of_ranges(const std::vector<engine::StateRange>& ranges) {
  return std::accumulate(
      ranges.begin(), ranges.end(), Bytes{0},
      [](Bytes sum, const engine::StateRange& range) { return sum + range.bytes(); });
}

[[noreturn]] void fail_to_write(const fs::path& path, int error_number) {
  throw Error(ErrorCategory::io, fmt::format("cannot write {}", path.string()), error_number);
}

void write_small(const fs::path& path, const std::string& text) {
  text::ReplacedFile file(path);
  file.write(text);
  file.commit();
}

Json json_of_all(const std::vector<engine::StateRange>& ranges) {
  Json json = Json::array();
  for (const engine::StateRange& range : ranges) json.push_back(json_of(range));
  return json;
}

Json describe(const engine::Blueprint& blueprint) {
  Json blocks = Json::array();
  for (const model::BlockSpec& block : blueprint.model.blocks) {
    blocks.push_back(Json::array({block.name, block.elements}));
  }
  return blocks;
}

/// Keeps what is on NVMe for the checkpoint `folder` of `step`. Empty if nothing is, or if the file
/// system cannot name the swap files: then all is copied.
engine::KeptStates keep_on_nvme(engine::Engine& engine, const fs::path& folder,
                                std::uint64_t step) {
  engine::KeptStates kept = engine.keep_states(step);
  if (kept.homes.empty()) return kept;
  const std::uint32_t rank = engine.blueprint().rank;
  kept.image.files = engine.link_swap_files(incomplete(folder), swap_name(rank),
                                            swap_name_elsewhere(folder, rank));
  if (!kept.image.files.empty()) return kept;
  engine.release_states(step);
  return {};
}

/// This rank's files of the checkpoint `folder`. Returns the checksum of the one that names the
/// ranges.
std::uint64_t write_rank(engine::Engine& engine, const fs::path& folder, std::uint64_t step) {
  using schedule::Homes;
  const std::uint32_t rank = engine.blueprint().rank;
  const engine::KeptStates kept = keep_on_nvme(engine, folder, step);
  const Homes homes = kept.homes.empty() ? Homes::all : Homes::in_memory;
  const std::vector<engine::StateRange> ranges = engine.saved_ranges(homes);
  StatesWriter states(states_file(incomplete(folder), rank), bytes_of_ranges(ranges));
  engine.save_states(
      [&states](const engine::StateRange&, ConstHostBytes bytes) { states.write(bytes); }, homes);
  Json json = Json::object({{"version", kCheckpointVersion},
                            {"ranges", json_of_all(ranges)},
                            {"bytes", bytes_of_ranges(ranges)},
                            {"chunk_bytes", kCheckpointChunk},
                            {"chunks", states.finish()}});
  if (!kept.homes.empty()) json.add("swap", json_of(kept));
  const std::string text = seal(json);
  write_small(ranges_file(incomplete(folder), rank), text);
  return state::checksum(std::as_bytes(std::span(text)));
}

std::string facts_text(const CheckpointFacts& facts, const engine::Blueprint& blueprint,
                       std::span<const std::uint64_t> checksums) {
  Json ranks = Json::array();
  for (const std::uint64_t checksum : checksums) ranks.push_back(fmt::format("{:016x}", checksum));
  Json content = json_of(facts);
  content["blocks"] = describe(blueprint);
  content["ranks"] = ranks;
  return seal(content);
}

/// Gives the complete folder its name. When this returns, a power cut takes nothing of it away: all
/// files are on the disk, and the names from the run directory down to them.
void publish(const fs::path& temporary, const fs::path& folder) {
  text::sync_folder(temporary);
  if (std::rename(temporary.c_str(), folder.c_str()) != 0) fail_to_write(folder, errno);
  text::sync_folder(folder.parent_path());
  text::sync_name(folder.parent_path());  // the first checkpoint of a run has made it
}

/// The engine may write again to what only removed checkpoints have kept.
void release_removed(engine::Engine& engine, const fs::path& run) {
  const std::vector<fs::path> left = checkpoints_of(run);
  for (const std::uint64_t step : engine.kept_checkpoints()) {
    const fs::path folder = checkpoint_folder(run, step);
    if (std::find(left.begin(), left.end(), folder) == left.end()) engine.release_states(step);
  }
}

}  // namespace

fs::path write_checkpoint(engine::Engine& engine, const fs::path& run, const CheckpointFacts& facts,
                          std::uint64_t keep, comm::Ranks* ranks) {
  const bool first = ranks == nullptr || ranks->rank() == 0;
  const fs::path folder = checkpoint_folder(run, facts.step);
  const fs::path temporary = incomplete(folder);
  const auto discard = [&] {
    if (first) remove_incomplete(folder.parent_path());
  };
  engine.finish();
  try {
    comm::together(ranks, [&] {
      discard();
      // One of the same step is from before the run was resumed, and damaged. Its files elsewhere
      // have the names that the new ones get.
      if (first) remove_checkpoint(folder);
      std::error_code error;
      if (first && !fs::create_directories(temporary, error))
        fail_to_write(temporary, error.value());
    });
    std::uint64_t own = 0;
    comm::together(ranks, [&] { own = write_rank(engine, folder, facts.step); });
    std::vector<std::uint64_t> all(ranks == nullptr ? 1 : ranks->world(), own);
    if (ranks != nullptr) {
      ranks->all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
    }
    comm::together(ranks, [&] {
      if (!first) return;
      write_small(facts_file(temporary), facts_text(facts, engine.blueprint(), all));
      publish(temporary, folder);
      remove_later(run, facts.step);
      remove_older(run, folder, keep);
    });
  } catch (...) {
    std::error_code ignored;
    if (!fs::exists(folder, ignored)) engine.release_states(facts.step);
    discard();
    throw;
  }
  release_removed(engine, run);
  return folder;
}

void check_room_for_checkpoints(const engine::Engine& engine, const fs::path& run,
                                std::uint64_t keep, std::uint32_t world) {
  std::error_code error;
  const fs::space_info space = fs::space(run, error);
  const Bytes each = world * bytes_of_ranges(engine.saved_ranges(schedule::Homes::in_memory));
  const std::uint64_t more = keep + 1 - std::min<std::uint64_t>(keep, checkpoints_of(run).size());
  if (error || space.available / more >= each) return;
  throw Error(
      ErrorCategory::io,
      fmt::format("ballast.checkpoint_every: {} has {} free, but {} checkpoints of {} need more "
                  "while one is written; make room, choose another run directory with --out, or "
                  "set ballast.checkpoint_keep to less",
                  run.string(), format_bytes(space.available), keep + 1, format_bytes(each)));
}

}  // namespace ballast::train
