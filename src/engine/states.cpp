#include "src/engine/states.h"

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
#include "ballast/model/initialize.h"
#include "ballast/model/quantized_values.h"
#include "ballast/schedule/rank_sizes.h"
#include "ballast/state/checksum.h"

#include "src/engine/in_units.h"
#include "src/engine/initial_magnitudes.h"
#include "src/engine/saved_states.h"

namespace ballast::engine {
namespace {

/// Initial weights that a thread makes at a time: they stay in its cache.
constexpr Elems kAtATime = Elems{1} << 14;
/// Elements that a thread takes at a time. All threads work close together, so that a file is read
/// in one sequence.
constexpr Elems kUnit = 4 * kAtATime;

using Masters = std::span<const float>;

/// Makes bf16 values the weights that split_master() makes of them: only NaNs differ. Without
/// branches, which compilers turn into vectors.
void make_weights(HostBytes values) {
  for (Bytes at = 0; at < values.size(); at += sizeof(Bf16)) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, values.data() + at, sizeof bits);
    const bool nan = (bits & 0x7fffU) > 0x7f80U;
    bits = static_cast<std::uint16_t>(bits | (nan ? 0x40U : 0U));
    std::memcpy(values.data() + at, &bits, sizeof bits);
  }
}

/// Makes initial values with the threads of the update. Memory arrives zeroed, so only what was
/// filled before is cleared.
class Filler {
 public:
  Filler(const Blueprint& blueprint, const WeightSource& source, std::uint64_t seed,
         const cpu_adam::Updater& team)
      : blueprint_(blueprint),
        source_(source),
        seed_(seed),
        team_(team),
        magnitudes_(blueprint.model, team) {}

  void fill(HomePiece& piece) {
    make_magnitudes(piece.block);
    const HeldBlock held(blueprint_, piece.block, piece.sub_group);
    const Array array = {.tensors = blueprint_.model.blocks[piece.block].tensors,
                         .weights = !piece.states,
                         .type = held.layout.type};
    if (array.weights && held.code_bytes > 0) return fill_coded(piece, held, array);
    const ShardRange& own = array.weights ? held.weights : held.shard;
    const bool zero = std::none_of(array.tensors.begin(), array.tensors.end(),
                                   [&](const auto& tensor) { return has_values(array, tensor); });
    const Overlap here(piece, array.weights ? 0 : held.layout.master.offset,
                       array.weights ? held.width : held.layout.master_width(),
                       zero ? 0 : own.elements);
    piece.zeros_from = 0;
    if (here.count > 0) {
      piece.zeros_from =
          static_cast<Bytes>(here.bytes.data() + here.bytes.size() - piece.bytes.data());
    }
    clear_around(piece, here);
    fill(array, own.first + here.first, here);
  }

 private:
  /// What is filled of a block: weights, or what their masters have beyond them.
  struct Array {
    const std::vector<model::TensorSpec>& tensors;  ///< in ascending order
    bool weights;
    DType type;  ///< of the weights
  };
  /// The bytes of a place that may not be zero.
  struct Filled {
    Bytes begin = 0;
    Bytes end = 0;
  };

  /// Weights that are codes in part. The codes of a block are made for its first piece.
  void fill_coded(HomePiece& piece, const HeldBlock& held, const Array& array) {
    std::memset(piece.bytes.data(), 0, piece.bytes.size());
    const Elems plain = held.weights.elements;
    const Overlap here(piece, 0, held.width, plain);
    if (here.count > 0) fill(array, here.first, here);
    const Overlap codes(piece, plain * held.width, 1, held.code_bytes);
    if (codes.count > 0) {
      encode(piece.block, held.code_bytes);
      std::memcpy(codes.bytes.data(), encoded_->codes.data() + codes.first, codes.count);
    }
    piece.zeros_from = piece.bytes.size();
    Filled& used = filled_[piece.bytes.data()];
    used = {0, std::max(used.end, piece.zeros_from)};
  }

  /// Makes the codes of all matrices of a block, of the source or of its values, unless they are
  /// here. A thread takes whole blocks of the codes at a time.
  void encode(std::size_t block, Bytes bytes) {
    if (encoded_ && encoded_->block == block) return;
    const model::Quantization& how = *blueprint_.model.quantization;
    encoded_.emplace(Encoded{block, std::vector<std::byte>(bytes)});
    for (const model::BlockCodes::Matrix& matrix :
         model::BlockCodes(blueprint_.model, blueprint_.model.blocks[block]).matrices) {
      std::byte* const out = encoded_->codes.data() + matrix.offset;
      if (source_.read_codes && source_.read_codes(*matrix.tensor, {out, matrix.arrays.bytes})) {
        continue;
      }
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

  /// The magnitudes of the block's adapters, which come before the weights that they follow from.
  void make_magnitudes(std::size_t block) {
    const model::BlockSpec& spec = blueprint_.model.blocks[block];
    if (source_.has_magnitudes || !magnitudes_.lacks(spec)) return;
    const model::BlockCodes codes(blueprint_.model, spec);
    if (codes.bytes > 0) encode(block, codes.bytes);
    const auto read = [&](const model::TensorSpec& map, Elems first, std::span<float> out) {
      const auto coded = std::find_if(codes.matrices.begin(), codes.matrices.end(),
                                      [&](const auto& matrix) { return matrix.tensor == &map; });
      if (coded != codes.matrices.end()) {
        model::decode(*blueprint_.model.quantization, coded->arrays,
                      encoded_->codes.data() + coded->offset, first, out);
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

  /// Zeroes what an earlier piece has left outside of `here`. Makes all pages resident if they will
  /// be filled: others read as zeros without memory.
  void clear_around(const HomePiece& piece, const Overlap& here) {
    const HostBytes bytes = piece.bytes;
    const Bytes begin = piece.zeros_from - here.bytes.size();
    Filled& used = filled_[bytes.data()];
    if (used.end == 0 && here.count > 0) {
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
    // A smaller piece leaves the rest as it is.
    const bool more = used.end > bytes.size();
    used = {here.count > 0 ? begin : bytes.size(), more ? used.end : piece.zeros_from};
  }

  /// Whether the source delivers the tensor's weights as bf16.
  [[nodiscard]] bool is_bf16(const Array& array, const model::TensorSpec& tensor) const {
    return array.type == DType::bf16 && source_.read_bf16 && source_.is_bf16(tensor);
  }
  /// Whether the tensor's part of the array may not be zero.
  [[nodiscard]] bool has_values(const Array& array, const model::TensorSpec& tensor) const {
    return array.weights || (array.type != DType::f32 && !is_bf16(array, tensor));
  }

  /// Fills `here`, whose first element is element `first` of the block. Padding between tensors
  /// becomes zero, and so do remainders of tensors that have none.
  void fill(const Array& array, Elems first, const Overlap& here) const {
    in_units(team_, here.count, kUnit, [&](Elems from, Elems to) {
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

  /// Elements [from, to) of `here` are those of the tensor from `first` on.
  void make(const Array& array, const model::TensorSpec& tensor, Elems first, Elems from, Elems to,
            const Overlap& here) const {
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
    if (tensor.init == model::Init::row_norms && !source_.has_magnitudes) {
      return magnitudes_.copy(tensor, first, values);
    }
    if (source_.read) return source_.read(tensor, first, values);
    model::initialize(tensor, seed_, first, values);
  }

  const Blueprint& blueprint_;
  const WeightSource& source_;
  std::uint64_t seed_;
  const cpu_adam::Updater& team_;
  InitialMagnitudes magnitudes_;
  std::map<const std::byte*, Filled> filled_;  ///< by address of a place
  struct Encoded {
    std::size_t block;
    std::vector<std::byte> codes;
  };
  std::optional<Encoded> encoded_;  ///< the block whose codes were made last
};

/// Collects masters of the elements whose states are here.
class MasterReader {
 public:
  /// `first`: index of the first element in the block.
  MasterReader(const Blueprint& blueprint, Elems first, std::span<float> masters)
      : blueprint_(blueprint), first_(first), masters_(masters) {}

  void read(const HomePiece& piece) {
    const HeldBlock held(blueprint_, piece.block, piece.sub_group);
    const StateArray& master = held.layout.master;
    if (!piece.states) {
      // Also the masters of frozen weights, which have no states.
      with_training_type(held.layout.type, [&](auto type) {
        using T = decltype(type);
        for_wanted<T>(piece, 0, held.weights, [&](Elems i, T w) { masters_[i] = to_float(w); });
      });
      collect_codes(piece, held);
    } else if (held.layout.type == DType::bf16) {
      for_wanted<std::uint16_t>(piece, master.offset, held.shard, [&](Elems i, std::uint16_t low) {
        masters_[i] = join_master({to_bf16(masters_[i]), low});
      });
    } else if (held.layout.type == DType::f16) {
      for_wanted<float>(piece, master.offset, held.shard,
                        [&](Elems i, float m) { masters_[i] = m; });
    }
  }

  /// Decodes what has been read; after all pieces.
  void finish() {
    if (codes_.empty()) return;
    const model::BlockSpec& block = blueprint_.model.blocks[block_];
    for (const auto& matrix : model::BlockCodes(blueprint_.model, block).matrices) {
      const Elems begin = std::max(first_, matrix.tensor->offset);
      const Elems end =
          std::min(first_ + masters_.size(), matrix.tensor->offset + matrix.tensor->size);
      if (begin >= end) continue;
      const std::span<float> values = masters_.subspan(begin - first_, end - begin);
      model::decode(*blueprint_.model.quantization, matrix.arrays, codes_.data() + matrix.offset,
                    begin - matrix.tensor->offset, values);
      with_training_type(blueprint_.type, [&](auto type) {
        for (float& value : values) value = to_float(from_float<decltype(type)>(value));
      });
    }
  }

 private:
  /// Keeps the codes in a piece until all are there.
  void collect_codes(const HomePiece& piece, const HeldBlock& held) {
    const Overlap codes(piece, held.weights.elements * held.width, 1, held.code_bytes);
    if (codes.count == 0) return;
    block_ = piece.block;
    codes_.resize(held.code_bytes);
    std::memcpy(codes_.data() + codes.first, codes.bytes.data(), codes.count);
  }

  /// Calls `take(i, value)` for those of an array of `held` elements that are in the piece and
  /// wanted. The array begins at `offset` of its home.
  template <class T, class Take>
  void for_wanted(const HomePiece& piece, Bytes offset, const ShardRange& held, Take take) const {
    const Elems first = std::max(first_, held.first);
    const Elems end = std::min(first_ + masters_.size(), held.first + held.elements);
    if (first >= end) return;
    const Overlap here(piece, offset + (first - held.first) * sizeof(T), sizeof(T), end - first);
    for (Elems i = 0; i < here.count; ++i) take(first - first_ + here.first + i, here.get<T>(i));
  }

  const Blueprint& blueprint_;
  Elems first_;
  std::span<float> masters_;  ///< first the weights, which come before the states
  std::size_t block_ = 0;
  std::vector<std::byte> codes_;  ///< of the block, if it has any
};

/// Hashes pieces of weights and states. Each array has a hash of its own, because those of
/// different sub-groups come in turn.
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

  /// Digests of this rank's shard and of the weights that every rank has.
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

schedule::Plan reading_plan(const Blueprint& blueprint, std::size_t first, std::size_t count) {
  return schedule::build_read(blueprint.workload, blueprint.placement, blueprint.options,
                              static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(count));
}

}  // namespace

void fill_states(const Blueprint& blueprint, const WeightSource& source, std::uint64_t seed,
                 const cpu_adam::Updater& team, const Perform& perform) {
  Filler filler(blueprint, source, seed, team);
  perform(schedule::build_fill(blueprint.workload, blueprint.placement, blueprint.options),
          [&filler](HomePiece& piece) { filler.fill(piece); });
}

std::vector<float> read_master(const Blueprint& blueprint, comm::Ranks* ranks, std::size_t block,
                               Elems first, Elems count, const Perform& perform) {
  const schedule::RankSizes sizes(blueprint.workload);
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
  const model::BlockSpec& spec = blueprint.model.blocks[block];
  // Frozen weights that are whole are here.
  if (!part_of_states || (!part_of_weights && spec.frozen_elements > 0)) read(first, values);
  if (!part_of_states || shard.room == 0) return values;
  std::vector<float> own(shard.room);
  read(shard.first, std::span(own).first(shard.elements));
  std::vector<float> all(ranks->world() * own.size());
  ranks->all_gather(std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(all)));
  const Elems end = part_of_weights ? spec.elements : spec.trained_elements();
  for (std::size_t i = 0; i < values.size() && first + i < end; ++i) {
    const Elems at = first + i;
    const auto number = static_cast<std::uint32_t>(at / own.size());
    values[i] = all[sizes.owner_of(number) * own.size() + at % own.size()];
  }
  return values;
}

std::uint64_t hash_states(const Blueprint& blueprint, comm::Ranks* ranks, const Perform& perform) {
  StateHash hash(blueprint);
  perform(reading_plan(blueprint, 0, blueprint.model.blocks.size()),
          [&hash](const HomePiece& piece) { hash.add(piece); });
  const std::array<std::uint64_t, 2> found = hash.digests();
  if (ranks == nullptr) return found[0];
  std::vector<std::uint64_t> all(found.size() * ranks->world());
  ranks->all_gather(std::as_bytes(std::span(found)), std::as_writable_bytes(std::span(all)));
  state::RunningChecksum together;
  const schedule::RankSizes sizes(blueprint.workload);
  for (std::uint32_t p = 0; p < ranks->world(); ++p) {
    const std::size_t r = sizes.owner_of(p);
    together.add(std::as_bytes(std::span(&all[2 * r], 1)));
    if (all[2 * r + 1] == found[1]) continue;
    throw Error(ErrorCategory::state,
                "rank " + std::to_string(r) + " has different weights than this rank");
  }
  return together.digest();
}

}  // namespace ballast::engine
