#include <algorithm>
#include <array>
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

namespace ballast::train {
namespace {

namespace fs = std::filesystem;
using engine::StateKind;
using engine::StateRange;
using text::Json;

constexpr std::array kKinds = {StateKind::weights,         StateKind::remainders,
                               StateKind::first_moments,   StateKind::second_moments,
                               StateKind::first_exponents, StateKind::second_exponents};

const std::vector<Json>& array_of(const Json& object, std::string_view key, const fs::path& path) {
  const Json* const value = object.find(key);
  if (value == nullptr || !value->is_array())
    refuse_checkpoint(path, fmt::format("has no array '{}'", key));
  return value->elements();
}

StateRange range_of(const Json& json, const fs::path& path) {
  const auto& parts = json.elements();
  const auto whole = [&](std::size_t i) {
    const auto number = parts[i].is_number() ? parts[i].whole() : std::nullopt;
    if (!number) refuse_checkpoint(path, "a range is not as it should be");
    return *number;
  };
  if (parts.size() != 5) refuse_checkpoint(path, "a range is not as it should be");
  const auto* const kind = std::find_if(
      kKinds.begin(), kKinds.end(), [&](StateKind known) { return parts[1] == to_string(known); });
  if (kind == kKinds.end()) refuse_checkpoint(path, "a range is of an unknown kind");
  return {whole(0), *kind, whole(2), whole(3), whole(4)};
}

}  // namespace

struct Checkpoint::StateFile {
  fs::path path;
  Descriptor descriptor;
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
  for (const Json& checksum : array_of(json, "ranks", path)) add_file(checksum.text());
}

Checkpoint::~Checkpoint() = default;
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;

void Checkpoint::add_file(const std::string& checksum) {
  const auto rank = static_cast<std::uint32_t>(files_.size());
  const fs::path path = ranges_file(folder_, rank);
  const Json json = read_sealed(path);
  if (checksum_text(seal(json)) != checksum)
    refuse_checkpoint(path, "belongs to another checkpoint");
  StateFile file = {.path = states_file(folder_, rank)};
  file.descriptor = text::open_file(file.path, O_RDONLY, ErrorCategory::data);
  file.bytes = whole_of(json, "bytes", path);
  if (whole_of(json, "chunk_bytes", path) != kCheckpointChunk) {
    refuse_checkpoint(path, "its chunks have another size than this program's");
  }
  for (const Json& chunk : array_of(json, "chunks", path)) file.checksums.push_back(chunk.text());
  const Bytes size = text::regular_file_size(file.descriptor, file.path, ErrorCategory::data);
  const Bytes chunks = (file.bytes + kCheckpointChunk - 1) / kCheckpointChunk;
  if (size != file.bytes || file.checksums.size() != chunks) {
    refuse_checkpoint(file.path, fmt::format("has {} bytes instead of {}", size, file.bytes));
  }
  Bytes offset = 0;
  for (const Json& json_range : array_of(json, "ranges", path)) {
    const StateRange range = range_of(json_range, path);
    pieces_[{range.block, range.kind}].push_back({range, files_.size(), offset});
    offset += range.bytes();
  }
  if (offset != file.bytes) refuse_checkpoint(path, "its ranges do not add up to its file");
  files_.push_back(std::move(file));
}

void Checkpoint::verify(std::uint32_t first, std::uint32_t of) const {
  std::vector<std::byte> chunk;
  for (std::size_t f = first; f < files_.size(); f += of) {
    const StateFile& file = files_[f];
    Bytes offset = 0;
    for (const std::string& checksum : file.checksums) {
      chunk.resize(std::min(kCheckpointChunk, file.bytes - offset));
      text::read_fully(file.descriptor, file.path, offset, chunk);
      if (checksum_text(chunk) != checksum) {
        refuse_checkpoint(file.path,
                          fmt::format("damaged: the checksum of {} bytes at offset {} differs",
                                      chunk.size(), offset));
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
    const StateFile& file = files_[piece.file];
    text::read_fully(
        file.descriptor, file.path, piece.offset + (begin - piece.range.first) * range.width,
        bytes.subspan((begin - range.first) * range.width, (end - begin) * range.width));
    done += end - begin;
  }
  if (done != range.count) {
    refuse_checkpoint(folder_, fmt::format("lacks a part of the {} of block {}",
                                           to_string(range.kind), range.block));
  }
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
