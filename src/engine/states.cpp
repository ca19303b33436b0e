#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/dtype.h"
#include "ballast/core/error.h"
#include "ballast/model/packed_values.h"
#include "ballast/state/checksum.h"
#include "ballast/step/problem.h"

#include "src/engine/held_states.h"
#include "src/engine/initial_weights.h"

namespace ballast::engine {
namespace {

/// Number of initial weights that a thread makes at a time, so that they stay in its cache.
constexpr Elems kAtATime = Elems{1} << 14;
/// Elements that a thread takes at a time. All threads work on neighbouring parts, so that a file
/// is read in one sequence.
constexpr Elems kUnit = 4 * kAtATime;

using Masters = std::span<const float>;

/// Converts bf16 values to the weights that split_master() would make of them: only NaNs differ.
/// Without branches, so that compilers can vectorise it.
void make_weights(HostBytes values) {
  for (Bytes at = 0; at < values.size(); at += sizeof(Bf16)) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, values.data() + at, sizeof bits);
    const bool nan = (bits & 0x7fffU) > 0x7f80U;
    bits = static_cast<std::uint16_t>(bits | (nan ? 0x40U : 0U));
    std::memcpy(values.data() + at, &bits, sizeof bits);
  }
}

/// Makes initial values with the threads of the update. Memory arrives zeroed, so only places that
/// were filled before are cleared.
class Filler {
 public:
  Filler(const Blueprint& blueprint, WeightSource& source, const cpu_adam::Updater& team)
      : blueprint_(blueprint), source_(source), team_(team), magnitudes_(blueprint.own(), team) {}

  void fill(HomePiece& piece) {
    make_magnitudes(piece.block);
    const HeldBlock held(blueprint_, piece.block, piece.sub_group);
    const Array array = {.tensors = blueprint_.own().blocks[piece.block].tensors,
                         .weights = !piece.states,
                         .type = held.layout.type};
    const std::vector<PieceArray> arrays = arrays_in(piece, held_arrays(held, piece.states));
    if (array.weights && held.code_bytes > 0) return fill_quantized(piece, held, array, arrays);
    const PieceArray* filled = nullptr;
    for (const PieceArray& here : arrays) {
      if (has_values(here.array.kind) && has_values(array)) filled = &here;
    }
    piece.zeros_from = 0;
    if (filled != nullptr) {
      piece.zeros_from =
          static_cast<Bytes>(filled->bytes.data() + filled->bytes.size() - piece.bytes.data());
    }
    clear_around(piece, filled == nullptr ? 0 : filled->bytes.size());
    if (filled != nullptr) fill(array, *filled);
  }

 private:
  /// The part of a block that is filled: weights, or the additional bits of their masters.
  struct Array {
    const std::vector<model::TensorSpec>& tensors;  ///< in ascending order
    bool weights;
    DType type;  ///< type of the weights
  };
  /// The bytes of a place that may not be zero.
  struct FilledRange {
    Bytes begin = 0;
    Bytes end = 0;
  };

  /// Fills partly quantised weights. The codes of a block are made for its first piece.
  void fill_quantized(HomePiece& piece, const HeldBlock& held, const Array& array,
                      const std::vector<PieceArray>& arrays) {
    std::memset(piece.bytes.data(), 0, piece.bytes.size());
    for (const PieceArray& here : arrays) {
      if (here.array.kind == StateKind::weights) {
        fill(array, here);
        continue;
      }
      encode(piece.block, held.code_bytes);
      std::memcpy(here.bytes.data(), encoded_->codes.data() + here.array.first, here.bytes.size());
    }
    piece.zeros_from = piece.bytes.size();
    FilledRange& used = filled_[piece.bytes.data()];
    used = {0, std::max(used.end, piece.zeros_from)};
  }

  /// Makes the codes of all matrices of a block, from the source's codes or from its values, unless
  /// they were made last. A thread takes whole quantisation blocks at a time.
  void encode(std::size_t block, Bytes bytes) {
    if (encoded_ && encoded_->block == block) return;
    const model::Quantization& how = *blueprint_.own().quantization;
    encoded_.emplace(EncodedBlock{block, std::vector<std::byte>(bytes)});
    for (const model::BlockCodes::Matrix& matrix :
         model::BlockCodes(blueprint_.own(), blueprint_.own().blocks[block]).matrices) {
      std::byte* const out = encoded_->codes.data() + matrix.offset;
      if (source_.read_codes(*matrix.tensor, {out, matrix.arrays.bytes})) continue;
      const bool nf4 = how.format == model::Quantization::Format::nf4;
      std::vector<float> scales(matrix.arrays.scales_count);
      in_units(team_, matrix.arrays.elements, kAtATime, [&](Elems from, Elems to) {
        std::array<float, kAtATime> memory;
        const std::span<float> masters(memory.data(), to - from);
        make_masters(*matrix.tensor, from, masters);
        model::encode(how, masters, out + (nf4 ? from / 2 : from),
                      scales.data() + from / how.block());
      });
      model::store_scales(matrix.arrays, scales, out);
    }
  }

  /// Makes the magnitudes of the block's adapters, which precede the weights from which they are
  /// computed.
  void make_magnitudes(std::size_t block) {
    const model::BlockSpec& spec = blueprint_.own().blocks[block];
    if (source_.has_magnitudes() || !magnitudes_.lacks(spec)) return;
    const model::BlockCodes codes(blueprint_.own(), spec);
    if (codes.bytes > 0) encode(block, codes.bytes);
    const auto read = [&](const model::TensorSpec& map, Elems first, std::span<float> out) {
      const auto quantized =
          std::find_if(codes.matrices.begin(), codes.matrices.end(),
                       [&](const auto& matrix) { return matrix.tensor == &map; });
      if (quantized != codes.matrices.end()) {
        model::decode(*blueprint_.own().quantization, quantized->arrays,
                      encoded_->codes.data() + quantized->offset, first, out);
      } else {
        make_masters(map, first, out);
        if (blueprint_.type == DType::bf16) {
          for (float& value : out) value = to_float(split_master(value).weight);
        }
      }
      with_training_type(blueprint_.type, [&](auto type) {
        for (float& value : out) value = to_float(from_float<decltype(type)>(value));
      });
    };
    magnitudes_.make(spec, read);
  }

  /// Zeroes the remains of an earlier piece outside the `count` bytes before `zeros_from`, which
  /// will be filled. Makes all pages resident if there are remains, because other pages read as
  /// zeros without memory.
  void clear_around(const HomePiece& piece, Bytes count) {
    const HostBytes bytes = piece.bytes;
    const Bytes begin = piece.zeros_from - count;
    FilledRange& used = filled_[bytes.data()];
    if (used.end == 0 && count > 0) {
      in_units(team_, bytes.size(), 256 * kKiB, [&](Bytes from, Bytes to) {
        for (Bytes page = from; page < to; page += kPage) bytes[page] = std::byte{0};
      });
    }
    const auto clear = [&](Bytes from, Bytes to) {
      if (from < to) std::memset(bytes.data() + from, 0, to - from);
    };
    const Bytes end = std::min(used.end, bytes.size());
    clear(used.begin, std::min(end, begin));
    clear(std::max(used.begin, piece.zeros_from), end);
    // A smaller piece leaves the rest unchanged.
    const bool more = used.end > bytes.size();
    used = {count > 0 ? begin : bytes.size(), more ? used.end : piece.zeros_from};
  }

  /// Returns whether the source provides the tensor's weights as bf16.
  [[nodiscard]] bool is_bf16(const Array& array, const model::TensorSpec& tensor) const {
    return array.type == DType::bf16 && source_.is_bf16(tensor);
  }
  /// Returns whether the tensor's part of the array may not be zero.
  [[nodiscard]] bool has_values(const Array& array, const model::TensorSpec& tensor) const {
    return array.weights || (array.type != DType::f32 && !is_bf16(array, tensor));
  }
  [[nodiscard]] bool has_values(const Array& array) const {
    return std::any_of(array.tensors.begin(), array.tensors.end(),
                       [&](const auto& tensor) { return has_values(array, tensor); });
  }
  /// Moments start as zeros.
  static bool has_values(StateKind kind) {
    return kind == StateKind::weights || kind == StateKind::remainders ||
           kind == StateKind::masters;
  }

  /// Fills `here`. Padding between tensors becomes zero, and so do remainders of tensors without
  /// remainders.
  void fill(const Array& array, const PieceArray& here) const {
    const Elems first = here.array.first;
    in_units(team_, here.array.count, kUnit, [&](Elems from, Elems to) {
      Elems at = from;
      const auto clear_until = [&](Elems end) {
        const HostBytes gap = here.part(at, end);
        std::memset(gap.data(), 0, gap.size());
      };
      for (const model::TensorSpec& tensor : array.tensors) {
        const Elems begin = std::max(first + at, tensor.offset);
        const Elems end = std::min(first + to, tensor.offset + tensor.size);
        if (begin >= end || !has_values(array, tensor)) continue;
        clear_until(begin - first);
        make(array, tensor, begin - tensor.offset, begin - first, end - first, here);
        at = end - first;
      }
      clear_until(to);
    });
  }

  /// Makes elements [from, to) of `here`, which are those of the tensor from `first` on.
  void make(const Array& array, const model::TensorSpec& tensor, Elems first, Elems from, Elems to,
            const PieceArray& here) const {
    if (array.weights && is_bf16(array, tensor)) {
      const HostBytes stored = here.part(from, to);
      source_.read_bf16(tensor, first, stored);
      return make_weights(stored);
    }
    std::array<float, kAtATime> memory;
    for (Elems at = from; at < to; at += kAtATime) {
      const std::span<float> masters(memory.data(), std::min(kAtATime, to - at));
      make_masters(tensor, first + at - from, masters);
      if (array.type == DType::bf16 && array.weights) {
        here.put(at, masters, [](float master) { return split_master(master).weight; });
      } else if (array.type == DType::bf16) {
        here.put(at, masters, [](float master) { return split_master(master).remainder; });
      } else if (array.type == DType::f16 && array.weights) {
        here.put(at, masters, [&](float master) { return half_of(master, tensor); });
      } else {
        here.put(at, masters, [](float master) { return master; });
      }
    }
  }

  static F16 half_of(float master, const model::TensorSpec& tensor) {
    const F16 half = to_f16(master);
    if (std::isinf(to_float(half)) && std::isfinite(master)) {
      throw Error(ErrorCategory::data,
                  fmt::format("tensor '{}' has the value {}, but fp16 ends at 65504; train in bf16 "
                              "(bf16.enabled) or fp32",
                              tensor.name, master));
    }
    return half;
  }

  void make_masters(const model::TensorSpec& tensor, Elems first, std::span<float> values) const {
    if (tensor.init == model::Init::row_norms && !source_.has_magnitudes()) {
      return magnitudes_.copy(tensor, first, values);
    }
    source_.read(tensor, first, values);
  }

  const Blueprint& blueprint_;
  WeightSource& source_;
  const cpu_adam::Updater& team_;
  InitialMagnitudes magnitudes_;
  std::map<const std::byte*, FilledRange> filled_;  ///< by address of a place
  struct EncodedBlock {
    std::size_t block;
    std::vector<std::byte> codes;
  };
  std::optional<EncodedBlock> encoded_;  ///< the block whose codes were made last
};

/// Collects masters of the elements whose states are here.
class MasterReader {
 public:
  /// `first`: index in the block of the first element.
  MasterReader(const Blueprint& blueprint, Elems first, std::span<float> masters)
      : blueprint_(blueprint), first_(first), masters_(masters) {}

  void read(const HomePiece& piece) {
    const HeldBlock held(blueprint_, piece.block, piece.sub_group);
    for (const PieceArray& here : arrays_in(piece, held_arrays(held, piece.states))) {
      switch (here.array.kind) {
        case StateKind::weights:  // also the masters of frozen weights, which have no states
          with_training_type(held.layout.type, [&](auto type) {
            using T = decltype(type);
            for_wanted<T>(here, [&](Elems i, T w) { masters_[i] = to_float(w); });
          });
          break;
        case StateKind::codes:
          collect_codes(piece.block, held, here);
          break;
        case StateKind::remainders:
          for_wanted<std::uint16_t>(here, [&](Elems i, std::uint16_t low) {
            masters_[i] = join_master({to_bf16(masters_[i]), low});
          });
          break;
        case StateKind::masters:
          for_wanted<float>(here, [&](Elems i, float m) { masters_[i] = m; });
          break;
        case StateKind::first_moments:
        case StateKind::second_moments:
        case StateKind::first_exponents:
        case StateKind::second_exponents:
          break;
      }
    }
  }

  /// Dequantises what has been read. Call it after all pieces.
  void finish() {
    if (codes_.empty()) return;
    const model::BlockSpec& block = blueprint_.own().blocks[block_];
    for (const auto& matrix : model::BlockCodes(blueprint_.own(), block).matrices) {
      const Elems begin = std::max(first_, matrix.tensor->offset);
      const Elems end =
          std::min(first_ + masters_.size(), matrix.tensor->offset + matrix.tensor->size);
      if (begin >= end) continue;
      const std::span<float> values = masters_.subspan(begin - first_, end - begin);
      model::decode(*blueprint_.own().quantization, matrix.arrays, codes_.data() + matrix.offset,
                    begin - matrix.tensor->offset, values);
      with_training_type(blueprint_.type, [&](auto type) {
        for (float& value : values) value = to_float(from_float<decltype(type)>(value));
      });
    }
  }

 private:
  /// Keeps the codes of a piece until all pieces have come.
  void collect_codes(std::size_t block, const HeldBlock& held, const PieceArray& here) {
    block_ = block;
    codes_.resize(held.code_bytes);
    std::memcpy(codes_.data() + here.array.first, here.bytes.data(), here.bytes.size());
  }

  /// Calls `take(i, value)` for the requested entries.
  template <class T, class Take>
  void for_wanted(const PieceArray& here, Take take) const {
    const Elems first = here.array.first;
    const Elems begin = std::max(first_, first);
    const Elems end = std::min(first_ + masters_.size(), first + here.array.count);
    for (Elems e = begin; e < end; ++e) take(e - first_, here.get<T>(e - first));
  }

  const Blueprint& blueprint_;
  Elems first_;
  std::span<float> masters_;  ///< first the weights, which precede the states
  std::size_t block_ = 0;
  std::vector<std::byte> codes_;  ///< codes of the block, if it has any
};

/// Hashes pieces of weights and states. Each array has a separate hash, because arrays of different
/// sub-groups alternate.
class StateHash {
 public:
  explicit StateHash(const Blueprint& blueprint) : blueprint_(blueprint) {}

  void add(const HomePiece& piece) {
    const HeldBlock held(blueprint_, piece.block, piece.sub_group);
    for_own_entries(blueprint_, held, piece, [this](const StateRange& range, ConstHostBytes bytes) {
      own_[{range.block, range.kind}].add(bytes);
    });
    if (!piece.states && !held.keeps_part) common_.add(piece.bytes);
  }

  /// Returns the digests of this rank's shard, and of the weights that every rank has.
  [[nodiscard]] std::array<std::uint64_t, 2> digests() const {
    std::vector<std::uint64_t> own;
    for (const auto& [array, hash] : own_) own.push_back(hash.digest());
    return {state::checksum(std::as_bytes(std::span(own))), common_.digest()};
  }

 private:
  const Blueprint& blueprint_;
  std::map<std::pair<std::size_t, StateKind>, state::RunningChecksum> own_;
  state::RunningChecksum common_;
};

/// Maximum elements of each rank that are gathered at once.
constexpr Elems kGathered = Elems{1} << 24U;

plan::Plan reading_plan(const Blueprint& blueprint, std::size_t first, std::size_t count) {
  return step::build_read(blueprint.problem, blueprint.placement, blueprint.options,
                          static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(count));
}

}  // namespace

void fill_states(const Blueprint& blueprint, WeightSource& source, const cpu_adam::Updater& team,
                 const Perform& perform) {
  Filler filler(blueprint, source, team);
  perform(step::build_fill(blueprint.problem, blueprint.placement, blueprint.options),
          [&filler](HomePiece& piece) { filler.fill(piece); });
}

namespace {

/// read_master() for elements of this rank's block, which the ranks with the same tensors share.
std::vector<float> read_own_master(const Blueprint& blueprint, comm::Ranks* ranks,
                                   std::size_t block, Elems first, Elems count,
                                   const Perform& perform) {
  const step::RankSizes sizes(blueprint.problem);
  const bool part_of_weights = sizes.keeps_part_of_weights(static_cast<std::uint32_t>(block));
  const bool part_of_states = sizes.keeps_part_of_states(static_cast<std::uint32_t>(block));
  const ShardRange shard = even_shard(blueprint, block, !part_of_weights);
  const auto read = [&](Elems from, std::span<float> masters) {
    MasterReader reader(blueprint, from, masters);
    perform(reading_plan(blueprint, block, 1),
            [&reader](const HomePiece& piece) { reader.read(piece); });
    reader.finish();
  };
  std::vector<float> values(count);
  const model::BlockSpec& spec = blueprint.own().blocks[block];
  // Frozen weights that are whole are here.
  if (!part_of_states || (!part_of_weights && spec.frozen_elements > 0)) read(first, values);
  if (!part_of_states || shard.room == 0) return values;
  std::vector<float> own(shard.room);
  read(shard.first, std::span(own).first(shard.elements));
  std::vector<float> all(blueprint.mesh.ranks() * own.size());
  ranks->all_gather(std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(all)));
  const Elems end = part_of_weights ? spec.elements : spec.trained_elements();
  for (std::size_t i = 0; i < values.size() && first + i < end; ++i) {
    const Elems at = first + i;
    const auto number = static_cast<std::uint32_t>(at / own.size());
    const std::size_t owner = blueprint.mesh.rank_of(sizes.owner_of(number));
    values[i] = all[owner * own.size() + at % own.size()];
  }
  return values;
}

}  // namespace

std::vector<float> read_master(const Blueprint& blueprint, comm::Ranks* ranks, std::size_t block,
                               Elems first, Elems count, const Perform& perform) {
  const model::BlockSpec& spec = blueprint.model.blocks[block];
  if (blueprint.mesh.tensor == 1 || spec.pieces == 1) {
    return read_own_master(blueprint, ranks, block, first, count, perform);
  }
  const Elems size = spec.own_elements();
  const std::vector<float> own = read_own_master(blueprint, ranks, block, 0, size, perform);
  std::vector<float> values(count);
  std::vector<float> all;
  for (Elems at = 0; at < size; at += kGathered) {
    const auto part = std::span(own).subspan(at, std::min(kGathered, size - at));
    all.resize(blueprint.mesh.ranks() * part.size());
    ranks->all_gather(std::as_bytes(part), std::as_writable_bytes(std::span(all)));
    for (std::uint32_t place = 0; place < blueprint.mesh.tensor; ++place) {
      const std::size_t from = blueprint.mesh.rank_of(0, place) * part.size();
      const Elems piece = place * size + at;
      const Elems begin = std::max(first, piece);
      const Elems end = std::min(first + count, piece + part.size());
      for (Elems e = begin; e < end; ++e) values[e - first] = all[from + e - piece];
    }
  }
  return values;
}

std::uint64_t hash_states(const Blueprint& blueprint, comm::Ranks* ranks, const Perform& perform) {
  StateHash hash(blueprint);
  perform(reading_plan(blueprint, 0, blueprint.own().blocks.size()),
          [&hash](const HomePiece& piece) { hash.add(piece); });
  const std::array<std::uint64_t, 2> found = hash.digests();
  if (ranks == nullptr) return found[0];
  std::vector<std::uint64_t> all(found.size() * blueprint.mesh.ranks());
  ranks->all_gather(std::as_bytes(std::span(found)), std::as_writable_bytes(std::span(all)));
  state::RunningChecksum together;
  const step::RankSizes sizes(blueprint.problem);
  const Mesh& mesh = blueprint.mesh;
  for (std::uint32_t p = 0; p < mesh.ranks(); ++p) {
    const std::uint32_t place = p / mesh.sharers();
    const std::size_t r = mesh.rank_of(sizes.owner_of(p % mesh.sharers()), place);
    together.add(std::as_bytes(std::span(&all[2 * r], 1)));
    if (place != mesh.tensor_place() || all[2 * r + 1] == found[1]) continue;
    throw Error(ErrorCategory::state,
                "rank " + std::to_string(r) + " has different weights than this rank");
  }
  return together.digest();
}

}  // namespace ballast::engine
