#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/core/random.h"
#include "ballast/engine/run_states.h"
#include "ballast/state/checksum.h"
#include "ballast/text/json.h"

#include "src/checkpoint/format.h"
#include "src/checkpoint/writer.h"
#include "tests/support/temp_dir.h"

namespace ballast::test {

/// States of three blocks in 8 bits, and the checkpoints that ranks would write of them.
struct WrittenStates {
  using Kind = engine::StateKind;
  struct Block {
    std::string name;
    Elems elements;
  };

  static std::vector<Kind> kinds() {
    return {Kind::weights,        Kind::remainders,      Kind::first_moments,
            Kind::second_moments, Kind::first_exponents, Kind::second_exponents};
  }
  static Bytes width(Kind kind) {
    return kind == Kind::weights || kind == Kind::remainders ? 2 : 1;
  }
  static Elems entries(Kind kind, Elems elements) {
    const bool shared = kind == Kind::first_exponents || kind == Kind::second_exponents;
    return shared ? (elements + 255) / 256 : elements;
  }
  WrittenStates() {
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      for (const Kind kind : kinds()) {
        auto& bytes = arrays_[{b, kind}];
        bytes.resize(entries(kind, blocks[b].elements) * width(kind));
        for (std::size_t i = 0; i < bytes.size(); ++i) {
          bytes[i] = static_cast<std::byte>(random_u64(b, i, static_cast<std::uint64_t>(kind)));
        }
      }
    }
  }

  /// The bytes of a whole array.
  [[nodiscard]] const std::vector<std::byte>& array(std::size_t block, Kind kind) const {
    return arrays_.at({block, kind});
  }
  [[nodiscard]] std::uint64_t hash() const {
    std::vector<std::uint64_t> digests;
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      for (const Kind kind : kinds()) digests.push_back(state::checksum(array(b, kind)));
    }
    return state::checksum(std::as_bytes(std::span(digests)));
  }

  /// Writes the checkpoint of `world` ranks.
  void write(const std::filesystem::path& folder, std::uint32_t world) const {
    std::filesystem::create_directories(folder);
    text::Json content = checkpoint::json_of(facts);
    content["blocks"] = text::Json::array();
    for (const Block& block : blocks) {
      content["blocks"].push_back(text::Json::array({block.name, block.elements}));
    }
    content["ranks"] = text::Json::array();
    for (std::uint32_t rank = 0; rank < world; ++rank) {
      const std::string text = checkpoint::seal(write_rank(folder, rank, world));
      std::ofstream(checkpoint::ranges_file(folder, rank)) << text;
      content["ranks"].push_back(checkpoint::checksum_text(text));
    }
    std::ofstream(checkpoint::facts_file(folder)) << checkpoint::seal(content);
  }

  checkpoint::CheckpointFacts facts = {
      .step = 7, .updates = 6, .skipped_in_a_row = 1, .batch = 4, .length = 32};
  std::vector<Block> blocks = {{"embedding", 5000}, {"layer 0", 400000}, {"head", 300}};

 private:
  [[nodiscard]] text::Json write_rank(const std::filesystem::path& folder, std::uint32_t rank,
                                      std::uint32_t world) const {
    std::vector<std::byte> bytes;
    text::Json ranges = text::Json::array();
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      const Elems all = blocks[b].elements;
      const Elems room = round_up((all + world - 1) / world, 256);
      const Elems begin = std::min(all, rank * room);
      const Elems end = std::min(all, begin + room);
      for (const Kind kind : kinds()) {
        const Elems first = entries(kind, begin);
        const Elems count = entries(kind, end) - first;
        if (count == 0) continue;
        const auto& whole = array(b, kind);
        const auto from = whole.begin() + static_cast<std::ptrdiff_t>(first * width(kind));
        bytes.insert(bytes.end(), from, from + static_cast<std::ptrdiff_t>(count * width(kind)));
        ranges.push_back(text::Json::array({b, to_string(kind), first, count, width(kind)}));
      }
    }
    checkpoint::StatesWriter writer(checkpoint::states_file(folder, rank), bytes.size());
    writer.write(bytes);
    return text::Json::object({{"version", checkpoint::kCheckpointVersion},
                               {"ranges", ranges},
                               {"bytes", bytes.size()},
                               {"chunk_bytes", checkpoint::kCheckpointChunk},
                               {"chunks", writer.finish()}});
  }

  std::map<std::pair<std::size_t, Kind>, std::vector<std::byte>> arrays_;
};

inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Replaces a file by a new one, because truncating one may wait for the disk.
inline void write_text(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::remove(path);
  std::ofstream(path, std::ios::binary) << text;
}

/// States as checkpoints of 1, 2 and 3 ranks and as portable ones.
struct Forms {
  Forms() {
    for (const std::uint32_t world : {1U, 2U, 3U}) {
      const std::filesystem::path folder =
          dir.path() / "run" / checkpoint::kCheckpoints / ("step-" + std::to_string(world));
      states.write(folder, world);
      checkpoint::export_states(folder, dir.path() / ("out-" + std::to_string(world)),
                                [](Bytes, Bytes) {});
      folders.push_back(folder);
      folders.push_back(dir.path() / ("out-" + std::to_string(world)));
    }
  }
  TempDir dir;
  WrittenStates states;
  std::vector<std::filesystem::path> folders;
};

}  // namespace ballast::test
