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
#include "src/train/write_behind.h"

namespace ballast::train {
namespace {

namespace fs = std::filesystem;
using text::Json;

constexpr std::string_view kIncomplete = ".incomplete-";

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

/// A file of states, written in order, and the checksums of its chunks.
class StatesWriter {
 public:
  StatesWriter(const fs::path& path, Bytes size) : file_(path, size) {
    chunk_.reserve(kCheckpointChunk);
  }

  void write(ConstHostBytes bytes) {
    while (!bytes.empty()) {
      const Bytes count = std::min(bytes.size(), kCheckpointChunk - chunk_.size());
      chunk_.insert(chunk_.end(), bytes.begin(),
                    bytes.begin() + static_cast<std::ptrdiff_t>(count));
      bytes = bytes.subspan(count);
      if (chunk_.size() == kCheckpointChunk) pass_on();
    }
  }

  /// The checksums, after all is on the disk.
  Json finish() {
    if (!chunk_.empty()) pass_on();
    file_.commit();
    return std::move(checksums_);
  }

 private:
  void pass_on() {
    checksums_.push_back(checksum_text(chunk_));
    file_.write(chunk_);
    chunk_.clear();
  }

  WriteBehind file_;
  std::vector<std::byte> chunk_;
  Json checksums_ = Json::array();
};

Json json_of(const std::vector<engine::StateRange>& ranges) {
  Json json = Json::array();
  for (const engine::StateRange& range : ranges) {
    json.push_back(
        Json::array({range.block, to_string(range.kind), range.first, range.count, range.width}));
  }
  return json;
}

Json describe(const engine::Blueprint& blueprint) {
  Json blocks = Json::array();
  for (const model::BlockSpec& block : blueprint.model.blocks) {
    blocks.push_back(Json::array({block.name, block.elements}));
  }
  return blocks;
}

/// This rank's files. Returns the checksum of the one that names the ranges.
std::uint64_t write_rank(engine::Engine& engine, const fs::path& folder) {
  const std::uint32_t rank = engine.blueprint().rank;
  const std::vector<engine::StateRange> ranges = engine.saved_ranges();
  StatesWriter states(states_file(folder, rank), bytes_of_ranges(ranges));
  engine.save_states(
      [&states](const engine::StateRange&, ConstHostBytes bytes) { states.write(bytes); });
  const std::string text = seal(Json::object({{"version", kCheckpointVersion},
                                              {"ranges", json_of(ranges)},
                                              {"bytes", bytes_of_ranges(ranges)},
                                              {"chunk_bytes", kCheckpointChunk},
                                              {"chunks", states.finish()}}));
  write_small(ranges_file(folder, rank), text);
  return state::checksum(std::as_bytes(std::span(text)));
}

std::string facts_text(const CheckpointFacts& facts, const engine::Blueprint& blueprint,
                       std::span<const std::uint64_t> checksums) {
  Json ranks = Json::array();
  for (const std::uint64_t checksum : checksums) ranks.push_back(fmt::format("{:016x}", checksum));
  Json losses = Json::array();
  for (const double loss : facts.losses) losses.push_back(loss);
  return seal(Json::object({{"version", kCheckpointVersion},
                            {"step", facts.step},
                            {"updates", facts.updates},
                            {"skipped_in_a_row", facts.skipped_in_a_row},
                            {"batch", facts.batch},
                            {"sequence_length", facts.length},
                            {"metrics_bytes", facts.metrics_bytes},
                            {"skipped_batches", facts.skipped_batches},
                            {"losses", losses},
                            {"blocks", describe(blueprint)},
                            {"ranks", ranks}}));
}

/// Gives the complete folder its name.
void publish(const fs::path& temporary, const fs::path& folder) {
  text::sync_folder(temporary);
  std::error_code ignored;
  fs::remove_all(folder, ignored);  // of the same step, before the run was resumed
  if (std::rename(temporary.c_str(), folder.c_str()) != 0) fail_to_write(folder, errno);
  text::sync_folder(folder.parent_path());
}

/// Keeps `newest` and those before it, `keep` in all. Later ones are of a time that the run has
/// gone back behind, because they were damaged.
void remove_others(const fs::path& run, const fs::path& newest, std::uint64_t keep) {
  const std::vector<fs::path> folders = checkpoints_of(run);
  const auto first =
      static_cast<std::size_t>(std::find(folders.begin(), folders.end(), newest) - folders.begin());
  std::error_code ignored;
  for (std::size_t i = 0; i < folders.size(); ++i) {
    if (i < first || i >= first + keep) fs::remove_all(folders[i], ignored);
  }
}

/// Removes what a killed process has left.
void remove_incomplete(const fs::path& checkpoints) {
  std::error_code error;
  std::vector<fs::path> found;
  for (fs::directory_iterator entry(checkpoints, error);
       !error && entry != fs::directory_iterator(); entry.increment(error)) {
    if (entry->path().filename().string().starts_with(kIncomplete)) found.push_back(entry->path());
  }
  for (const fs::path& folder : found) fs::remove_all(folder, error);
}

}  // namespace

fs::path write_checkpoint(engine::Engine& engine, const fs::path& run, const CheckpointFacts& facts,
                          std::uint64_t keep, comm::Ranks* ranks) {
  const bool first = ranks == nullptr || ranks->rank() == 0;
  const fs::path folder = checkpoint_folder(run, facts.step);
  const fs::path temporary =
      folder.parent_path() / fmt::format("{}{}", kIncomplete, folder.filename().string());
  const auto discard = [&] {
    if (first) remove_incomplete(folder.parent_path());
  };
  engine.finish();
  try {
    comm::together(ranks, [&] {
      discard();
      std::error_code error;
      if (first && !fs::create_directories(temporary, error))
        fail_to_write(temporary, error.value());
    });
    std::uint64_t own = 0;
    comm::together(ranks, [&] { own = write_rank(engine, temporary); });
    std::vector<std::uint64_t> all(ranks == nullptr ? 1 : ranks->world(), own);
    if (ranks != nullptr) {
      ranks->all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
    }
    comm::together(ranks, [&] {
      if (!first) return;
      write_small(facts_file(temporary), facts_text(facts, engine.blueprint(), all));
      publish(temporary, folder);
      remove_others(run, folder, keep);
    });
  } catch (...) {
    discard();
    throw;
  }
  return folder;
}

void check_room_for_checkpoints(const engine::Engine& engine, const fs::path& run,
                                std::uint64_t keep, std::uint32_t world) {
  std::error_code error;
  const fs::space_info space = fs::space(run, error);
  const Bytes each = world * bytes_of_ranges(engine.saved_ranges());
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
