#include "src/checkpoint/writer.h"

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

#include "ballast/comm/agreement.h"
#include "ballast/core/error.h"
#include "ballast/state/checksum.h"
#include "ballast/text/files.h"

#include "src/checkpoint/format.h"
#include "src/checkpoint/kept_checkpoints.h"
#include "src/checkpoint/owner.h"

namespace ballast::checkpoint {

StatesWriter::StatesWriter(const std::filesystem::path& path, Bytes size) : file_(path, size) {
  chunk_.reserve(kCheckpointChunk);
}

void StatesWriter::write(ConstHostBytes bytes) {
  while (!bytes.empty()) {
    const Bytes count = std::min(bytes.size(), kCheckpointChunk - chunk_.size());
    chunk_.insert(chunk_.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(count));
    bytes = bytes.subspan(count);
    if (chunk_.size() == kCheckpointChunk) pass_on();
  }
}

text::Json StatesWriter::finish() {
  if (!chunk_.empty()) pass_on();
  file_.commit();
  return std::move(checksums_);
}

void StatesWriter::pass_on() {
  checksums_.push_back(checksum_text(chunk_));
  file_.write(written_, chunk_);
  written_ += chunk_.size();
  chunk_.clear();
}

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
  for (const model::BlockSpec& block : model::whole_blocks(blueprint.model)) {
    blocks.push_back(Checkpoint::json_of(Checkpoint::describe(block)));
  }
  return blocks;
}

/// Keeps the states on NVMe for the checkpoint `folder` of `step`. Empty if there are none, or if
/// the file system cannot name the swap files, so that they must be copied.
engine::KeptStates keep_on_nvme(engine::Engine& engine, const fs::path& folder,
                                std::uint64_t step) {
  engine::KeptStates kept = engine.snapshot().keep(step);
  if (kept.homes.empty()) return kept;
  const std::uint32_t rank = engine.blueprint().mesh.rank;
  // Each rank looks for itself, because a host may have another number for the same device.
  const auto owner = owner_of(run_of(folder));
  if (!owner) fail_to_write(folder, ENOENT);
  kept.image.files = engine.snapshot().link(
      {incomplete(folder), swap_name(rank), swap_name_elsewhere(*owner, folder, rank),
       [&](const fs::path& directory) { record_owner(directory, *owner); }});
  if (!kept.image.files.empty()) return kept;
  engine.snapshot().release(step);
  return {};
}

std::string facts_text(const CheckpointFacts& facts, const engine::Blueprint& blueprint,
                       std::span<const std::uint64_t> checksums,
                       const std::optional<RunOwner>& owner) {
  Json ranks = Json::array();
  for (const std::uint64_t checksum : checksums) ranks.push_back(fmt::format("{:016x}", checksum));
  Json content = json_of(facts);
  content["blocks"] = describe(blueprint);
  if (blueprint.model.adapters) content["adapters"] = identity_of(blueprint.model.adapters);
  if (blueprint.model.quantization) {
    content["quantized_base"] = identity_of(blueprint.model.quantization);
  }
  content["ranks"] = ranks;
  if (owner) content["run"] = json_of(*owner);
  return seal(content);
}

/// Gives the complete folder its name. Afterwards a power cut cannot damage it: all files are on
/// the disk, and so are the names from the run directory down to them.
void publish(const fs::path& temporary, const fs::path& folder) {
  text::sync_folder(temporary);
  if (std::rename(temporary.c_str(), folder.c_str()) != 0) fail_to_write(folder, errno);
  text::sync_folder(folder.parent_path());
  text::sync_name(folder.parent_path());  // the first checkpoint of a run has created it
}

/// Lets the engine reuse extents that only removed checkpoints have kept. `newest` may not have its
/// name yet.
void release_removed(engine::Engine& engine, const fs::path& run, std::uint64_t newest) {
  const std::vector<fs::path> left = checkpoints_of(run);
  for (const std::uint64_t step : engine.snapshot().kept()) {
    const fs::path folder = checkpoint_folder(run, step);
    const bool has_name = std::find(left.begin(), left.end(), folder) != left.end();
    if (step != newest && !has_name) engine.snapshot().release(step);
  }
}

}  // namespace

CheckpointWriter::CheckpointWriter(engine::Engine& engine, fs::path run, CheckpointFacts facts,
                                   std::uint64_t keep, comm::Ranks* ranks)
    : engine_(engine),
      run_(std::move(run)),
      folder_(checkpoint_folder(run_, facts.step)),
      facts_(std::move(facts)),
      keep_(keep),
      ranks_(ranks),
      first_(ranks == nullptr || ranks->rank() == 0) {
  engine.finish();
  facts_.side_states = engine.side_states();
  try {
    comm::collective_try(ranks_, [this] { make_folder(); });
    comm::collective_try(ranks_, [this] { start_own(); });
  } catch (...) {
    give_up();
    throw;
  }
}

CheckpointWriter::~CheckpointWriter() {
  if (!published_) give_up();
}

void CheckpointWriter::make_folder() {
  if (!first_) return;
  remove_incomplete(folder_.parent_path());
  // A checkpoint of the same step is from before the run was resumed, and damaged. Its files
  // elsewhere have the names that the new ones will get.
  remove_checkpoint(folder_);
  const fs::path temporary = incomplete(folder_);
  std::error_code error;
  if (!fs::create_directories(temporary, error)) fail_to_write(temporary, error.value());
}

/// Passes states in host memory on in the background, and all others now.
void CheckpointWriter::start_own() {
  kept_ = keep_on_nvme(engine_, folder_, facts_.step);
  const step::Homes now = {.host = false, .nvme = kept_.homes.empty()};
  ranges_ = engine::saved_ranges(engine_.blueprint(), now);
  const std::vector<engine::StateRange> later = engine::background_ranges(engine_.blueprint());
  ranges_.insert(ranges_.end(), later.begin(), later.end());
  states_.emplace(states_file(incomplete(folder_), engine_.blueprint().mesh.rank),
                  bytes_of_ranges(ranges_));
  const auto sink = [this](const engine::StateRange&, ConstHostBytes bytes) {
    states_->write(bytes);
  };
  engine_.snapshot().save(sink, now);
  saving_ = engine_.snapshot().save_in_background(sink, [this] { chunks_ = states_->finish(); });
}

bool CheckpointWriter::in_background() const {
  return step::written_in_background(engine_.blueprint().placement, keep_);
}

bool CheckpointWriter::written() const {
  return saving_->done();
}

/// Completes this rank's last file. Returns its checksum.
std::uint64_t CheckpointWriter::finish_own() {
  saving_->finish();
  Json json = Json::object({{"version", kCheckpointVersion},
                            {"ranges", json_of_all(ranges_)},
                            {"bytes", bytes_of_ranges(ranges_)},
                            {"chunk_bytes", kCheckpointChunk},
                            {"chunks", std::move(chunks_)}});
  if (!kept_.homes.empty()) json.add("swap", json_of(kept_));
  const std::string text = seal(json);
  write_small(ranges_file(incomplete(folder_), engine_.blueprint().mesh.rank), text);
  return state::checksum(std::as_bytes(std::span(text)));
}

fs::path CheckpointWriter::publish() {
  std::uint64_t own = 0;
  comm::collective_try(ranks_, [&] { own = finish_own(); });
  std::vector<std::uint64_t> all(ranks_ == nullptr ? 1 : ranks_->world(), own);
  if (ranks_ != nullptr) {
    ranks_->all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
  }
  comm::collective_try(ranks_, [&] {
    if (!first_) return;
    const fs::path temporary = incomplete(folder_);
    write_small(facts_file(temporary),
                facts_text(facts_, engine_.blueprint(), all, owner_of(run_)));
    checkpoint::publish(temporary, folder_);
    remove_later(run_, facts_.step);
    remove_older(run_, folder_, keep_);
  });
  published_ = true;
  release_removed(engine_, run_, facts_.step);
  return folder_;
}

void CheckpointWriter::give_up() noexcept {
  try {
    if (saving_) saving_->cancel();
    states_.reset();
    std::error_code ignored;
    if (!fs::exists(folder_, ignored)) {
      engine_.snapshot().release(facts_.step);
      for (const fs::path& file : kept_.image.files) {
        if (parse_swap_name(file.filename().string())) fs::remove(file, ignored);
      }
    }
    if (first_) remove_incomplete(folder_.parent_path());
  } catch (...) {  // for example without memory; the next checkpoint removes the remains
  }
}

}  // namespace ballast::checkpoint
