#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/formats/safetensors.h"
#include "ballast/formats/safetensors_header.h"
#include "ballast/text/json.h"

#include "src/checkpoint/checkpoint.h"
#include "src/checkpoint/format.h"
#include "src/checkpoint/writer.h"
#include "src/formats/new_folder.h"

namespace ballast::checkpoint {

namespace {

namespace fs = std::filesystem;
using engine::StateKind;

}  // namespace

fs::path portable_file(const fs::path& folder, std::size_t block) {
  return folder / fmt::format("block-{}.safetensors", block);
}

std::string state_tensor(const std::string& block, StateKind kind) {
  std::string name = fmt::format("{}.{}", block, to_string(kind));
  std::replace(name.begin(), name.end(), ' ', '.');
  return name;
}

std::string_view state_dtype(StateKind kind, Bytes width, DType weights) {
  switch (kind) {
    case StateKind::remainders:
      return width == 2 ? "U16" : "";
    case StateKind::codes:
    case StateKind::first_exponents:
    case StateKind::second_exponents:
      return width == 1 ? "U8" : "";
    case StateKind::first_moments:
    case StateKind::second_moments:
      if (width == 1) return "U8";  // codes of 8-bit moments
      break;
    case StateKind::weights:
      if (width == 2 && weights == DType::f16) return "F16";
      break;
    case StateKind::masters:
      break;
  }
  if (width == 4) return "F32";
  return width == 2 ? "BF16" : "";
}

/// safetensors headers are read before the whole file is verified.
void Checkpoint::check_head(const StateFile& file) const {
  std::vector<std::byte> chunk;
  Bytes length = 0;
  for (std::size_t c = 0;
       c < file.checksums.size() && c * kCheckpointChunk < length + formats::kLengthBytes; ++c) {
    read_chunk(file, c, chunk);
    if (c == 0)
      std::memcpy(&length, chunk.data(), std::min<Bytes>(formats::kLengthBytes, chunk.size()));
  }
}

void Checkpoint::add_portable_file(const text::Json& described) {
  const std::size_t block = files_.size();
  const fs::path path = portable_file(folder_, block);
  open_states(path, described, facts_file(folder_));
  check_head(files_.back());
  const formats::SafetensorsReader reader(path);
  for (const formats::StoredTensor& tensor : reader.tensors()) {
    const auto kind =
        engine::state_kind(std::string_view(tensor.name).substr(tensor.name.rfind('.') + 1));
    const Bytes width = tensor.elements == 0 ? 0 : tensor.bytes / tensor.elements;
    const auto fits = [&](DType weights) {
      return tensor.dtype == state_dtype(*kind, width, weights);
    };
    if (!kind || width == 0 || tensor.name != state_tensor(blocks_[block].name, *kind) ||
        !(fits(DType::bf16) || fits(DType::f16))) {
      refuse_checkpoint(
          path, fmt::format("tensor '{}' is not a state of block '{}'",
                            text::printable(tensor.name), text::printable(blocks_[block].name)));
    }
    add_piece({block, *kind, 0, tensor.elements, width}, tensor.offset, path);
  }
}

namespace {

namespace fs = std::filesystem;
using engine::StateRange;
using text::Json;

/// Writes one portable checkpoint.
class StatesExport {
 public:
  StatesExport(const Checkpoint& from, const fs::path& out,
               const std::function<void(Bytes done, Bytes total)>& progress)
      : from_(from), states_(from), progress_(progress), arrays_(from.blocks().size()) {
    for (const StateRange& range : from.whole_ranges()) {
      arrays_[range.block].push_back(range);
      if (range.kind == StateKind::masters) weights_ = DType::f16;
      summary_.bytes += range.bytes();
    }
    folder_.emplace(out, summary_.bytes);
  }

  formats::ExportSummary write() {
    Json blocks = Json::array();
    Json files = Json::array();
    for (std::size_t b = 0; b < arrays_.size(); ++b) {
      blocks.push_back(Checkpoint::json_of(from_.blocks()[b]));
      files.push_back(write_block(b));
    }
    Json content = json_of(from_.facts());
    content["format"] = kPortable;
    content["ranks"] = from_.ranks();
    content["blocks"] = blocks;
    if (!from_.adapters().is_null()) content["adapters"] = from_.adapters();
    if (!from_.quantization().is_null()) content["quantized_base"] = from_.quantization();
    content["files"] = files;
    folder_->add(facts_file("").string(), seal(content));
    folder_->finish();
    return summary_;
  }

 private:
  /// Returns the entry of checkpoint.json for the file.
  Json write_block(std::size_t block) {
    std::vector<formats::StoredTensor> tensors;
    Bytes data = 0;
    for (const StateRange& range : arrays_[block]) {
      tensors.push_back({.name = state_tensor(from_.blocks()[block].name, range.kind),
                         .dtype = std::string(state_dtype(range.kind, range.width, weights_)),
                         .shape = {range.count},
                         .bytes = range.bytes()});
      if (data % kPage == 0) ++summary_.aligned;
      data += range.bytes();
    }
    const std::string head = formats::format_head(tensors, {});
    const Bytes size = head.size() + data;
    StatesWriter writer(portable_file(folder_->temporary(), block), size);
    writer.write(std::as_bytes(std::span(head)));
    for (const StateRange& range : arrays_[block]) {
      states_.read(range, [&](ConstHostBytes bytes) {
        progress_(done_, summary_.bytes);
        writer.write(bytes);
        done_ += bytes.size();
      });
    }
    summary_.tensors += tensors.size();
    ++summary_.files;
    return Json::object(
        {{"bytes", size}, {"chunk_bytes", kCheckpointChunk}, {"chunks", writer.finish()}});
  }

  const Checkpoint& from_;
  CheckedStates states_;
  const std::function<void(Bytes done, Bytes total)>& progress_;
  std::vector<std::vector<StateRange>> arrays_;  ///< by block
  DType weights_ = DType::bf16;                  ///< type of 2-byte weights
  formats::ExportSummary summary_;
  std::optional<formats::NewFolder> folder_;
  Bytes done_ = 0;
};

}  // namespace

formats::ExportSummary export_states(const fs::path& from, const fs::path& out,
                                     const std::function<void(Bytes done, Bytes total)>& progress) {
  const auto export_one = [&](const fs::path& folder) {
    const Checkpoint checkpoint(folder);
    return StatesExport(checkpoint, out, progress).write();
  };
  check_names_states(from);
  if (names_checkpoint(from)) {
    formats::ExportSummary summary;
    with_restart_advice(from, [&] { summary = export_one(from); });
    return summary;
  }
  for (const fs::path& folder : checkpoints_of(from)) {
    try {
      return export_one(folder);
    } catch (const Error& error) {
      if (error.category() != ErrorCategory::data) throw;
      log(LogLevel::warning, fmt::format("skipped a checkpoint: {}", error.what()));
    }
  }
  refuse_checkpoint(from, "has no complete checkpoint");
}

}  // namespace ballast::checkpoint
