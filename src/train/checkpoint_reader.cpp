#include <algorithm>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>

#include "ballast/comm/together.h"
#include "ballast/core/error.h"
#include "ballast/core/log.h"
#include "ballast/text/files.h"

#include "src/train/checkpoint.h"
#include "src/train/checkpoint_format.h"
#include "src/train/checkpoint_swap.h"

namespace ballast::train {
namespace {

namespace fs = std::filesystem;
using engine::StateRange;
using text::Json;

std::shared_ptr<const Descriptor> open_states(const fs::path& path) {
  return std::make_shared<const Descriptor>(text::open_file(path, O_RDONLY, ErrorCategory::data));
}

}  // namespace

/// A part of a file of states, with the checksums of its chunks: all of rank-R.states, or a segment
/// of a swap file.
struct Checkpoint::StatePart {
  fs::path path;
  std::shared_ptr<const Descriptor> file;
  Bytes begin = 0;  ///< in the file
  Bytes bytes = 0;
  std::vector<std::string> checksums;
};

Checkpoint::Checkpoint(fs::path folder) : folder_(std::move(folder)) {
  const fs::path path = facts_file(folder_);
  const Json json = read_sealed(path);
  const auto whole = [&](std::string_view key) { return whole_of(json, key, path); };
  facts_ = {.step = whole("step"),
            .updates = whole("updates"),
            .skipped_in_a_row = whole("skipped_in_a_row"),
            .batch = whole("batch"),
            .length = whole("sequence_length"),
            .metrics_bytes = whole("metrics_bytes"),
            .skipped_batches = whole("skipped_batches")};
  for (const Json& loss : array_of(json, "losses", path)) facts_.losses.push_back(loss.number());
  for (const Json& block : array_of(json, "blocks", path)) {
    if (block.elements().size() != 2) refuse_checkpoint(path, "a block is not as it should be");
    blocks_.emplace_back(block.elements()[0].text(), block.elements()[1].text());
  }
  for (const Json& checksum : array_of(json, "ranks", path)) add_rank(checksum.text());
}

Checkpoint::~Checkpoint() = default;
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;

void Checkpoint::add_rank(const std::string& checksum) {
  const auto rank = static_cast<std::uint32_t>(kept_.size());
  const fs::path path = ranges_file(folder_, rank);
  const Json json = read_sealed(path);
  if (checksum_text(seal(json)) != checksum)
    refuse_checkpoint(path, "belongs to another checkpoint");
  add_states(json, path, states_file(folder_, rank));
  const Json* const swap = json.find("swap");
  kept_.push_back(swap == nullptr ? engine::KeptStates{} : kept_states_of(*swap, path));
  if (swap != nullptr) add_kept(kept_.back());
}

void Checkpoint::add_states(const Json& json, const fs::path& path, const fs::path& states) {
  StatePart file = {.path = states, .file = open_states(states)};
  file.bytes = whole_of(json, "bytes", path);
  if (whole_of(json, "chunk_bytes", path) != kCheckpointChunk) {
    refuse_checkpoint(path, "its chunks have another size than this program's");
  }
  for (const Json& chunk : array_of(json, "chunks", path)) file.checksums.push_back(chunk.text());
  const Bytes size = text::regular_file_size(*file.file, file.path, ErrorCategory::data);
  const Bytes chunks = (file.bytes + kCheckpointChunk - 1) / kCheckpointChunk;
  if (size != file.bytes || file.checksums.size() != chunks) {
    refuse_checkpoint(file.path, fmt::format("has {} bytes instead of {}", size, file.bytes));
  }
  Bytes offset = 0;
  for (const Json& json_range : array_of(json, "ranges", path)) {
    const StateRange range = range_of(json_range, path);
    pieces_[{range.block, range.kind}].push_back({range, parts_.size(), offset});
    offset += range.bytes();
  }
  if (offset != file.bytes) refuse_checkpoint(path, "its ranges do not add up to its file");
  parts_.push_back(std::move(file));
}

/// The segments of the homes' extents become parts, and the ranges in them pieces.
void Checkpoint::add_kept(const engine::KeptStates& kept) {
  std::vector<std::shared_ptr<const Descriptor>> files;
  std::vector<Bytes> sizes;
  for (const fs::path& file : kept.image.files) {
    files.push_back(open_states(file));
    sizes.push_back(text::regular_file_size(*files.back(), file, ErrorCategory::data));
  }
  const state::Stripe stripe = kept.image.stripe();
  for (const engine::KeptHome& home : kept.homes) {
    for (const state::Segment& segment : stripe.segments(home.content.extent)) {
      const fs::path& path = kept.image.files[segment.path];
      if (segment.offset + segment.bytes > sizes[segment.path]) {
        refuse_checkpoint(path, fmt::format("has {} bytes, too few", sizes[segment.path]));
      }
      StatePart part = {path, files[segment.path], segment.offset, segment.bytes, {}};
      for (Bytes at = 0; at < segment.bytes; at += state::kChunk) {
        part.checksums.push_back(
            fmt::format("{:016x}", home.content.checksums[(segment.start + at) / state::kChunk]));
      }
      add_pieces(home, segment);
      parts_.push_back(std::move(part));
    }
  }
}

/// The parts of the home's ranges that are in `segment`, which is the next part.
void Checkpoint::add_pieces(const engine::KeptHome& home, const state::Segment& segment) {
  for (const auto& [range, offset] : home.ranges) {
    const Bytes begin = std::max(offset, segment.start);
    const Bytes end = std::min(offset + range.bytes(), segment.start + segment.bytes);
    if (begin >= end) continue;
    const StateRange here = {range.block, range.kind, range.first + (begin - offset) / range.width,
                             (end - begin) / range.width, range.width};
    pieces_[{range.block, range.kind}].push_back({here, parts_.size(), begin - segment.start});
  }
}

void Checkpoint::verify(std::uint32_t first, std::uint32_t of) const {
  std::vector<std::byte> chunk;
  for (std::size_t f = first; f < parts_.size(); f += of) {
    const StatePart& file = parts_[f];
    Bytes offset = 0;
    for (const std::string& checksum : file.checksums) {
      chunk.resize(std::min(kCheckpointChunk, file.bytes - offset));
      text::read_fully(*file.file, file.path, file.begin + offset, chunk);
      if (checksum_text(chunk) != checksum) {
        refuse_checkpoint(file.path,
                          fmt::format("damaged: the checksum of {} bytes at offset {} differs",
                                      chunk.size(), file.begin + offset));
      }
      offset += chunk.size();
    }
  }
}

void Checkpoint::check_fits(const engine::Blueprint& blueprint) const {
  const auto& blocks = blueprint.model.blocks;
  bool same = blocks.size() == blocks_.size();
  for (std::size_t b = 0; same && b < blocks.size(); ++b) {
    same = blocks_[b] == std::pair(blocks[b].name, std::to_string(blocks[b].elements));
  }
  if (!same) refuse_checkpoint(folder_, "is of another model than the config's");
  for (const StateRange& range : engine::whole_ranges(blueprint)) {
    const auto found = pieces_.find({range.block, range.kind});
    const std::string what =
        fmt::format("{} of block '{}'", to_string(range.kind), blocks[range.block].name);
    if (found == pieces_.end()) {
      refuse_checkpoint(folder_, fmt::format("has no {}: the config has another optimizer, "
                                             "ballast.optimizer_states or bf16.enabled",
                                             what));
    }
    Elems covered = 0;
    for (const Piece& piece : found->second) {
      covered += piece.range.count;
      if (piece.range.width != range.width) {
        refuse_checkpoint(folder_, fmt::format("has {} of another format: the config has another "
                                               "ballast.optimizer_states or bf16.enabled",
                                               what));
      }
    }
    if (covered < range.count)
      refuse_checkpoint(folder_, fmt::format("lacks a part of the {}", what));
  }
}

void Checkpoint::read(const StateRange& range, HostBytes bytes) const {
  Elems done = 0;
  for (const Piece& piece : pieces_.at({range.block, range.kind})) {
    const Elems begin = std::max(range.first, piece.range.first);
    const Elems end = std::min(range.first + range.count, piece.range.first + piece.range.count);
    if (begin >= end) continue;
    const StatePart& part = parts_[piece.part];
    text::read_fully(
        *part.file, part.path,
        part.begin + piece.offset + (begin - piece.range.first) * range.width,
        bytes.subspan((begin - range.first) * range.width, (end - begin) * range.width));
    done += end - begin;
  }
  if (done != range.count) {
    refuse_checkpoint(folder_, fmt::format("lacks a part of the {} of block {}",
                                           to_string(range.kind), range.block));
  }
}

const engine::KeptStates& Checkpoint::kept_by(std::uint32_t rank) const {
  return kept_.at(rank);
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
    } catch (const Error&) {
      // A damaged checkpoint keeps nothing.
    }
  }
  return all;
}

Checkpoint Checkpoint::find(const fs::path& run, const engine::Blueprint& blueprint,
                            comm::Ranks* ranks, std::uint64_t before) {
  const std::uint32_t rank = ranks == nullptr ? 0 : ranks->rank();
  const std::uint32_t world = ranks == nullptr ? 1 : ranks->world();
  for (const fs::path& folder : checkpoints_of(run)) {
    std::optional<Checkpoint> found;
    try {
      comm::together(ranks, [&] {
        found.emplace(folder);
        found->verify(rank, world);
      });
    } catch (const Error& error) {
      if (error.category() == ErrorCategory::comm ||
          error.category() == ErrorCategory::interrupted) {
        throw;
      }
      if (rank == 0) log(LogLevel::warning, fmt::format("skipped a checkpoint: {}", error.what()));
      continue;
    }
    if (found->facts().step >= before) continue;
    comm::together(ranks, [&] { found->check_fits(blueprint); });
    return std::move(*found);
  }
  throw Error(ErrorCategory::data,
              fmt::format("{} has no whole checkpoint to resume from; a run writes them with "
                          "ballast.checkpoint_every",
                          run.string()));
}

}  // namespace ballast::train
