#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/state/checksum.h"
#include "ballast/text/files.h"

#include "src/checkpoint/checkpoint.h"
#include "src/checkpoint/format.h"
#include "src/checkpoint/kept_checkpoints.h"

namespace ballast::checkpoint {

namespace {

namespace fs = std::filesystem;
using engine::StateKind;
using engine::StateRange;
using text::Json;

Checkpoint::Block block_of(const Json& json, const fs::path& path) {
  const auto& parts = json.elements();
  const auto refuse = [&path] { refuse_checkpoint(path, "a block is malformed"); };
  if (parts.size() != 2 && parts.size() != 3) refuse();
  const auto elements = parts[1].is_number() ? parts[1].whole() : std::nullopt;
  if (!elements || !parts[0].is_string()) refuse();
  Checkpoint::Block block = {parts[0].text(), *elements};
  if (parts.size() == 2) return block;
  if (!parts[2].is_array()) refuse();
  for (const Json& name : parts[2].elements()) {
    if (!name.is_string()) refuse();
    block.frozen.push_back(name.text());
  }
  return block;
}

std::shared_ptr<const Descriptor> open_shared(const fs::path& path) {
  return std::make_shared<const Descriptor>(text::open_file(path, O_RDONLY, ErrorCategory::data));
}

/// Number of blocks whose names begin with `prefix`, but at least 1, because an uncut layer has
/// another name.
std::uint64_t count_tiles(const std::vector<Checkpoint::Block>& blocks, std::string_view prefix) {
  const auto count = std::count_if(
      blocks.begin(), blocks.end(),
      [prefix](const Checkpoint::Block& block) { return block.name.starts_with(prefix); });
  return std::max<std::uint64_t>(1, static_cast<std::uint64_t>(count));
}

/// Describes a checkpoint of a model with `tiles` and other blocks than those of `config`.
std::string describe_other_blocks(const TileCounts& tiles, const model::ModelConfig& config) {
  const auto other = [](std::string_view key, std::uint64_t here, std::uint64_t in_config) {
    return fmt::format("has model.{} {}, but the config has {}; set it to {}", key, here, in_config,
                       here);
  };
  if (tiles.layers != config.layer_tiles) {
    return other("layer_tiles", tiles.layers, config.layer_tiles);
  }
  if (tiles.vocabulary != config.vocabulary_tiles) {
    return other("vocabulary_tiles", tiles.vocabulary, config.vocabulary_tiles);
  }
  return "is of another model than the config's";
}

/// Refuses a checkpoint of a run that froze other tensors of a block.
void check_frozen(const fs::path& folder, const Checkpoint::Block& stored,
                  const Checkpoint::Block& here) {
  if (stored.frozen == here.frozen) return;
  refuse_checkpoint(
      folder,
      fmt::format("was written with another ballast.train: in block '{}' it has {} frozen tensors, "
                  "or other ones than the config; give the same patterns, or start "
                  "from its weights (ballast export) with model.weights",
                  text::printable(stored.name), stored.frozen.size()));
}

/// Number of entries in the pieces of an array.
template <class Pieces>
Elems count_of(const Pieces& pieces) {
  return pieces.back().range.first + pieces.back().range.count;
}

}  // namespace

Checkpoint::Checkpoint(fs::path folder) : folder_(std::move(folder)) {
  reading([this] { read_head(); });
}

void Checkpoint::read_head() {
  const fs::path path = facts_file(folder_);
  const Json json = read_sealed(path);
  facts_ = facts_of(json, path);
  for (const Json& block : array_of(json, "blocks", path)) blocks_.push_back(block_of(block, path));
  adapters_ = read_adapters(json.find("adapters"), path);
  quantization_ = read_quantization(json.find("quantized_base"), path);
  const Json* const format = json.find("format");
  if (format != nullptr && !(*format == kPortable)) {
    refuse_unreadable(path, "has an unknown format; use a newer version of this program");
  }
  portable_ = format != nullptr;
  if (portable_) {
    ranks_ = whole_of(json, "ranks", path);
    const auto& files = array_of(json, "files", path);
    if (files.size() != blocks_.size()) refuse_checkpoint(path, "does not have one file per block");
    for (const Json& file : files) add_portable_file(file);
  } else {
    for (const Json& checksum : array_of(json, "ranks", path)) add_rank(checksum.text());
    ranks_ = kept_.size();
  }
  check_complete();
}

Checkpoint::Block Checkpoint::describe(const model::BlockSpec& spec) {
  Block block = {spec.name, spec.plain_elements()};
  for (const model::TensorSpec& tensor : spec.tensors) {
    if (tensor.frozen) block.frozen.push_back(tensor.name.substr(spec.prefix.size()));
  }
  return block;
}

Json Checkpoint::json_of(const Block& block) {
  Json json = Json::array({block.name, block.elements});
  if (block.frozen.empty()) return json;
  Json names = Json::array();
  for (const std::string& name : block.frozen) names.push_back(name);
  json.push_back(std::move(names));
  return json;
}

Checkpoint::~Checkpoint() = default;
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;

void Checkpoint::add_rank(const std::string& checksum) {
  const auto rank = static_cast<std::uint32_t>(kept_.size());
  const fs::path path = ranges_file(folder_, rank);
  const Json json = read_sealed(path);
  if (checksum_text(seal(json)) != checksum)
    refuse_checkpoint(path, "belongs to another checkpoint");
  open_states(states_file(folder_, rank), json, path);
  Bytes offset = 0;
  for (const Json& json_range : array_of(json, "ranges", path)) {
    const StateRange range = range_of(json_range, path);
    add_piece(range, offset, path);
    offset += range.bytes();
  }
  if (offset != files_.back().bytes) {
    refuse_checkpoint(path, "the sizes of its ranges do not add up to the size of its file");
  }
  const Json* const swap = json.find("swap");
  kept_.push_back(swap == nullptr ? engine::KeptStates{} : kept_states_of(*swap, path));
  if (swap != nullptr) add_kept(kept_.back());
}

/// Adds a file for each segment of the homes' extents, with the parts of ranges in it.
void Checkpoint::add_kept(const engine::KeptStates& kept) {
  std::vector<std::shared_ptr<const Descriptor>> files;
  std::vector<Bytes> sizes;
  for (const fs::path& file : kept.image.files) {
    files.push_back(open_shared(file));
    sizes.push_back(text::regular_file_size(*files.back(), file, ErrorCategory::data));
  }
  const state::Stripe stripe = kept.image.stripe();
  for (const engine::KeptHome& home : kept.homes) {
    for (const state::Segment& segment : stripe.segments(home.content.extent)) {
      const fs::path& path = kept.image.files[segment.path];
      if (segment.offset + segment.bytes > sizes[segment.path]) {
        refuse_checkpoint(path, fmt::format("has {} bytes, too few", sizes[segment.path]));
      }
      StateFile part = {path, files[segment.path], segment.offset, segment.bytes, {}};
      for (Bytes at = 0; at < segment.bytes; at += state::kChunk) {
        part.checksums.push_back(
            fmt::format("{:016x}", home.content.checksums[(segment.start + at) / state::kChunk]));
      }
      files_.push_back(std::move(part));
      for (const auto& [range, offset] : home.ranges) {
        const Bytes begin = std::max(offset, segment.start);
        const Bytes end = std::min(offset + range.bytes(), segment.start + segment.bytes);
        if (begin >= end) continue;
        add_piece({range.block, range.kind, range.first + (begin - offset) / range.width,
                   (end - begin) / range.width, range.width},
                  begin - segment.start, path);
      }
    }
  }
}

/// Opens a file that is described by an object in the file `at`.
void Checkpoint::open_states(const fs::path& path, const Json& described, const fs::path& at) {
  StateFile file = {.path = path, .descriptor = open_shared(path)};
  file.bytes = whole_of(described, "bytes", at);
  if (whole_of(described, "chunk_bytes", at) != kCheckpointChunk) {
    refuse_checkpoint(at, "its chunks have another size than this program's");
  }
  for (const Json& chunk : array_of(described, "chunks", at)) {
    file.checksums.push_back(chunk.text());
  }
  const Bytes size = text::regular_file_size(*file.descriptor, file.path, ErrorCategory::data);
  if (size != file.bytes) {
    refuse_checkpoint(file.path, fmt::format("has {} bytes instead of {}", size, file.bytes));
  }
  if (file.checksums.size() != size / kCheckpointChunk + (size % kCheckpointChunk > 0 ? 1 : 0)) {
    refuse_checkpoint(at, fmt::format("does not have one checksum per chunk of {}",
                                      file.path.filename().string()));
  }
  files_.push_back(std::move(file));
}

/// Adds a range in the file that was opened last.
void Checkpoint::add_piece(const StateRange& range, Bytes offset, const fs::path& at) {
  const Bytes file = files_.back().bytes;
  const bool fits = range.block < blocks_.size() && !state_dtype(range.kind, range.width).empty() &&
                    range.count > 0 && offset <= file &&
                    range.count <= (file - offset) / range.width;
  if (!fits) refuse_checkpoint(at, "a range is malformed");
  pieces_[{range.block, range.kind}].push_back({range, files_.size() - 1, offset});
}

/// Checks that the pieces of each array cover it, and that every block has weights or codes.
void Checkpoint::check_complete() {
  const fs::path path = facts_file(folder_);
  const auto refuse = [&](StateKind kind, std::size_t block) {
    refuse_checkpoint(path, fmt::format("its files lack some {} of block '{}'", to_string(kind),
                                        text::printable(blocks_[block].name)));
  };
  for (auto& [array, pieces] : pieces_) {
    std::sort(pieces.begin(), pieces.end(),
              [](const Piece& a, const Piece& b) { return a.range.first < b.range.first; });
    Elems end = 0;
    for (const Piece& piece : pieces) {
      if (piece.range.first != end || piece.range.width != pieces.front().range.width) {
        refuse(array.second, array.first);
      }
      end += piece.range.count;
    }
  }
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    const auto weights = pieces_.find({b, StateKind::weights});
    const Elems found = weights == pieces_.end() ? 0 : count_of(weights->second);
    if (found != blocks_[b].elements) refuse(StateKind::weights, b);
    // A block whose matrices are all quantised, such as an expert, has only codes.
    if (found == 0 && !pieces_.contains({b, StateKind::codes})) refuse(StateKind::codes, b);
  }
}

std::vector<StateRange> Checkpoint::whole_ranges() const {
  std::vector<StateRange> ranges;
  for (const auto& [array, pieces] : pieces_) {
    ranges.push_back({array.first, array.second, 0, count_of(pieces), pieces.front().range.width});
  }
  return ranges;
}

std::vector<fs::path> Checkpoint::files() const {
  std::vector<fs::path> paths = {facts_file(folder_)};
  if (!portable_) {
    for (std::uint32_t r = 0; r < ranks_; ++r) paths.push_back(ranges_file(folder_, r));
  }
  for (const StateFile& file : files_) {
    if (std::find(paths.begin(), paths.end(), file.path) == paths.end()) paths.push_back(file.path);
  }
  return paths;
}

void Checkpoint::read_chunk(const StateFile& file, std::size_t index,
                            std::vector<std::byte>& chunk) const {
  const Bytes offset = index * kCheckpointChunk;
  chunk.resize(std::min(kCheckpointChunk, file.bytes - offset));
  reading([&] { text::read_fully(*file.descriptor, file.path, file.begin + offset, chunk); });
  if (checksum_text(chunk) == file.checksums[index]) return;
  refuse_checkpoint(file.path, fmt::format("damaged: the checksum of {} bytes at offset {} differs",
                                           chunk.size(), file.begin + offset));
}

void Checkpoint::verify(std::uint32_t first, std::uint32_t of,
                        const std::function<void(Bytes)>& progress) const {
  std::vector<std::byte> chunk;
  for (std::size_t f = first; f < files_.size(); f += of) {
    for (std::size_t c = 0; c < files_[f].checksums.size(); ++c) {
      read_chunk(files_[f], c, chunk);
      if (progress) progress(chunk.size());
    }
  }
}

TileCounts Checkpoint::tiles() const {
  return {.vocabulary = count_tiles(blocks_, "embedding "),
          .layers = count_tiles(blocks_, "layer 0 mlp ")};
}

std::optional<Checkpoint> newest_readable(const fs::path& from) {
  const std::vector<fs::path> folders =
      names_checkpoint(from) ? std::vector{from} : checkpoints_of(from);
  for (const fs::path& folder : folders) {
    try {
      return Checkpoint(folder);
    } catch (const Error&) {
      continue;
    }
  }
  return std::nullopt;
}

std::optional<TileCounts> tiles_of(const fs::path& from) {
  const std::optional<Checkpoint> found = newest_readable(from);
  return found ? std::optional(found->tiles()) : std::nullopt;
}

void Checkpoint::check_fits(const engine::Blueprint& blueprint, const Check& check) const {
  check_adapters(folder_, adapters_, blueprint.model.adapters);
  check_quantization(folder_, quantization_, blueprint.model.quantization);
  const auto blocks = model::whole_blocks(blueprint.model);
  bool same = blocks.size() == blocks_.size();
  for (std::size_t b = 0; same && b < blocks.size(); ++b) {
    same = blocks_[b].name == blocks[b].name;
    if (same) check_frozen(folder_, blocks_[b], describe(blocks[b]));
    same = same && blocks_[b].elements == blocks[b].plain_elements();
  }
  if (!same) refuse_checkpoint(folder_, describe_other_blocks(tiles(), blueprint.model.config));
  if (check) check(*this);
  for (const StateRange& range : engine::whole_ranges(blueprint)) {
    const auto found = pieces_.find({range.block, range.kind});
    const std::string what =
        fmt::format("{} of block '{}'", to_string(range.kind), blocks[range.block].name);
    if (found == pieces_.end()) {
      refuse_checkpoint(folder_,
                        fmt::format("has no {}: the config has another optimizer, "
                                    "ballast.optimizer_states, bf16.enabled or fp16.enabled",
                                    what));
    }
    if (found->second.front().range.width != range.width) {
      refuse_checkpoint(folder_,
                        fmt::format("has {} of another format: the config has another "
                                    "ballast.optimizer_states, bf16.enabled or fp16.enabled",
                                    what));
    }
    if (count_of(found->second) != range.count)
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
    const HostBytes part =
        bytes.subspan((begin - range.first) * range.width, (end - begin) * range.width);
    const Bytes offset = file.begin + piece.offset + (begin - piece.range.first) * range.width;
    reading([&] { text::read_fully(*file.descriptor, file.path, offset, part); });
    done += end - begin;
  }
  if (done != range.count) {
    refuse_checkpoint(folder_, fmt::format("lacks a part of the {} of block {}",
                                           to_string(range.kind), range.block));
  }
}

const engine::KeptStates& Checkpoint::kept_by(std::uint32_t rank) const {
  static const engine::KeptStates kNothing;
  return rank < kept_.size() ? kept_[rank] : kNothing;
}

void CheckedStates::read(const StateRange& range, const std::function<void(ConstHostBytes)>& sink) {
  for (const auto& piece : checkpoint_.pieces_.at({range.block, range.kind})) {
    const auto& file = checkpoint_.files_[piece.file];
    const Bytes end = piece.offset + piece.range.bytes();
    for (Bytes at = piece.offset; at < end;) {
      const std::size_t index = at / kCheckpointChunk;
      if (held_ != std::pair(piece.file, index)) {
        held_.reset();
        checkpoint_.read_chunk(file, index, chunk_);
        held_ = {piece.file, index};
      }
      const Bytes first = at % kCheckpointChunk;
      const Bytes count = std::min(end - at, chunk_.size() - first);
      sink(std::span(chunk_).subspan(first, count));
      at += count;
    }
  }
}

namespace {

namespace fs = std::filesystem;

CheckpointContent content_of(const Checkpoint& checkpoint) {
  CheckpointContent content = {
      .facts = checkpoint.facts(), .portable = checkpoint.portable(), .ranks = checkpoint.ranks()};
  std::map<std::pair<StateKind, Bytes>, Elems> entries;
  for (const StateRange& range : checkpoint.whole_ranges()) {
    entries[{range.kind, range.width}] += range.count;
  }
  for (const auto& [array, count] : entries) {
    content.states.push_back({std::string(to_string(array.first)), array.second, count});
  }
  for (fs::path& path : checkpoint.files()) {
    std::error_code error;
    const Bytes bytes = fs::file_size(path, error);
    content.files.push_back({std::move(path), error ? 0 : bytes});
  }
  return content;
}

std::uint64_t hash_of(const Checkpoint& checkpoint, const std::function<void(Bytes)>& progress) {
  CheckedStates states(checkpoint);
  std::vector<std::uint64_t> digests;
  for (const StateRange& range : checkpoint.whole_ranges()) {
    state::RunningChecksum hash;
    states.read(range, [&](ConstHostBytes bytes) {
      hash.add(bytes);
      progress(bytes.size());
    });
    digests.push_back(hash.digest());
  }
  return engine::hash_with(state::checksum(std::as_bytes(std::span(digests))),
                           checkpoint.facts().side_states);
}

}  // namespace

Bytes CheckpointContent::bytes() const {
  Bytes sum = 0;
  for (const CheckpointFile& file : files) sum += file.bytes;
  return sum;
}

CheckpointReport examine_checkpoint(const fs::path& folder, const CheckpointQuestions& questions,
                                    const std::function<void(Bytes done, Bytes total)>& progress) {
  CheckpointReport report = {.folder = folder};
  try {
    const Checkpoint checkpoint(folder);
    report.content = content_of(checkpoint);
    Bytes done = 0;
    const auto add = [&](Bytes bytes) {
      done += bytes;
      progress(done, report.content->bytes());
    };
    // The states are everything but the files' heads, which are checked when the files are opened.
    if (questions.hash) {
      report.hash = hash_of(checkpoint, add);
    } else if (questions.whole) {
      checkpoint.verify(0, 1, add);
    }
  } catch (const Error& error) {
    if (error.category() != ErrorCategory::data && error.category() != ErrorCategory::io) throw;
    (error.category() == ErrorCategory::data ? report.damage : report.unreadable) = error.what();
  }
  return report;
}

}  // namespace ballast::checkpoint
