#include "src/checkpoint/portable.h"

#include <algorithm>
#include <array>
#include <cstring>

#include <fmt/format.h>

#include "ballast/formats/safetensors.h"
#include "ballast/text/json.h"

#include "src/checkpoint/checkpoint.h"
#include "src/checkpoint/format.h"
#include "src/formats/safetensors_header.h"

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

}  // namespace ballast::checkpoint
