#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/step/labels.h"

namespace ballast::step {

/// The meaning of some bytes.
struct Content {
  enum class What : std::uint8_t {
    zeros,
    weights,        ///< weights of a block
    decoded,        ///< dequantised weights of a block
    states,         ///< states of a block; part: its sub-group
    value,          ///< a value of a micro-batch
    counts,         ///< a value of all ranks
    rows,           ///< rows of a table for a micro-batch; by: the run
    row_gradients,  ///< the gradient of such rows
    sum,            ///< a gradient sum; by: number of additions so far
    gradient,       ///< packed gradient of a block; by: see Sums
    statistics      ///< statistics of the gradient of a block
  };
  static constexpr std::uint64_t kUndone = std::uint64_t{1} << 63U;

  What what = What::zeros;
  std::uint32_t number = 0;  ///< number of the block, value or sum
  /// Values and rows: the micro-batch. Weights: sub-groups to which one more update has been
  /// applied.
  std::uint32_t part = 0;
  /// Weights, rows and states: updates applied, with kUndone if a rollback undoes the last one.
  /// Others: the run.
  std::uint64_t version = 0;
  std::uint32_t by = 0;  ///< values: position of the pass that wrote them last; see SerialOrder

  friend bool operator==(const Content&, const Content&) = default;
};

/// Content::by of a packed gradient.
struct Sums {
  static constexpr std::uint32_t kOfRank = 0;
  static constexpr std::uint32_t kOfAllRanks = 1;
  static constexpr std::uint32_t kZeros = 2;  ///< no micro-batch of any rank has added to it
};

inline std::string show(const Content& content) {
  constexpr std::string_view kNames[] = {"zeros", "weights",  "decoded",   "states",
                                         "value", "counts",   "rows",      "gradient of rows",
                                         "sum",   "gradient", "statistics"};
  return fmt::format("{} {} (part {}, version {}{}, by {})",
                     kNames[static_cast<std::size_t>(content.what)], content.number, content.part,
                     content.version & ~Content::kUndone,
                     (content.version & Content::kUndone) > 0 ? " undone" : "", content.by);
}

/// Whether what lies in a buffer is on its way: somebody must read it before it is replaced.
inline bool is_in_transit(const Buffer& buffer) {
  switch (buffer.kind) {
    case Kind::staging:
    case Kind::accumulators:
    case Kind::activations:
    case Kind::intermediates:
      return true;
    case Kind::gradients:  // on NVMe only a rollback may read it again
      return buffer.tier != Tier::nvme;
    case Kind::batch:
      return buffer.tier == Tier::device;
    default:
      return false;
  }
}

/// The meanings of the bytes of all buffers.
class SymbolicMemory {
 public:
  struct Piece {
    Bytes begin = 0;
    Bytes end = 0;
    Content content;
    Bytes at = 0;       ///< position of its first byte in the content
    bool read = false;  ///< whether it was read since it was written
  };

  explicit SymbolicMemory(const std::vector<Buffer>& buffers)
      : buffers_(buffers), held_(buffers.size()) {}

  [[nodiscard]] bool has_room(BufferId id, Bytes end) const { return end <= buffers_[id].bytes; }

  [[nodiscard]] bool has_no_bytes(BufferId id) const {
    return id != kNoBuffer && buffers_[id].bytes == 0;
  }

  /// Replaces bytes. Returns a part of them that was never read, if there is one.
  std::optional<Content> write(BufferId id, const Piece& piece) {
    std::vector<Piece>& held = held_[id];
    std::optional<Content> unread;
    std::vector<Piece> rest;
    for (const Piece& old : held) {
      if (old.end <= piece.begin || piece.end <= old.begin) {
        rest.push_back(old);
        continue;
      }
      if (!old.read) unread = old.content;
      if (old.begin < piece.begin)
        rest.push_back({old.begin, piece.begin, old.content, old.at, old.read});
      if (piece.end < old.end) {
        rest.push_back(
            {piece.end, old.end, old.content, old.at + (piece.end - old.begin), old.read});
      }
    }
    rest.push_back(piece);
    held = std::move(rest);
    return unread;
  }

  /// The pieces of [begin, end), in order. Marks them as read, and for weights also the frozen ones
  /// after them, which move with them.
  std::vector<Piece> read(BufferId id, Bytes begin, Bytes end) {
    std::vector<Piece> found;
    if (id == kNoBuffer) return found;
    for (Piece& piece : held_[id]) {
      if (piece.end <= begin || end <= piece.begin) continue;
      piece.read = true;
      const auto moves_with = [&](const Piece& other) {
        return piece.content.what == Content::What::weights &&
               other.content.what == Content::What::weights &&
               other.content.number == piece.content.number;
      };
      for (Piece& other : held_[id]) other.read = other.read || moves_with(other);
      const Bytes from = std::max(begin, piece.begin);
      found.push_back(
          {from, std::min(end, piece.end), piece.content, piece.at + (from - piece.begin), true});
    }
    std::sort(found.begin(), found.end(),
              [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
    return found;
  }

  /// Two extents on NVMe exchange their roles.
  void exchange(BufferId a, BufferId b) { std::swap(held_[a], held_[b]); }

  template <class Change>
  void for_all(const Change& change) {
    for (BufferId id = 0; id < held_.size(); ++id) {
      for (Piece& piece : held_[id]) change(id, piece);
    }
  }

 private:
  const std::vector<Buffer>& buffers_;
  std::vector<std::vector<Piece>> held_;
};

}  // namespace ballast::step
