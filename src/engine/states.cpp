#include "src/engine/states.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <span>
#include <string>

#include "ballast/core/dtype.h"
#include "ballast/core/error.h"
#include "ballast/schedule/rank_sizes.h"
#include "ballast/state/checksum.h"

#include "src/engine/saved_states.h"

namespace ballast::engine {
namespace {

/// Initial weights that a thread makes at a time: they stay in its cache.
constexpr Elems kAtATime = Elems{1} << 14;

using Masters = std::span<const float>;

/// Makes initial values with the threads of the update. Memory arrives zeroed, so only what was
/// filled before is cleared.
class Filler {
 public:
  Filler(const Blueprint& blueprint, const WeightSource& source, std::uint64_t seed,
         const cpu_adam::Updater& team)
      : blueprint_(blueprint), source_(source), seed_(seed), team_(team) {}

  void fill(HomePiece& piece) {
    const HeldBlock held(blueprint_, piece.block, piece.sub_group);
    const bool weights = !piece.states;
    const bool zero = !weights && (!held.layout.split || !has_remainders(piece.block));
    clear(piece.bytes, !zero);
    piece.zeros_from = 0;
    if (zero) return;
    const ShardRange& own = weights ? held.weights : held.shard;
    const Overlap here(piece, weights ? 0 : held.layout.remainder.offset,
                       weights ? held.width : sizeof(std::uint16_t), own.elements);
    const Elems first = own.first + here.first;
    for_masters(piece.block, first, here.count, weights, [&](Elems at, Masters masters) {
      if (weights && !held.layout.split) {
        here.put(at, masters, [](float master) { return master; });
      } else if (weights) {
        here.put(at, masters, [](float master) { return split_master(master).weight; });
      } else {
        here.put(at, masters, [](float master) { return split_master(master).remainder; });
      }
    });
    if (here.count == 0) return;
    piece.zeros_from =
        static_cast<Bytes>(here.bytes.data() + here.bytes.size() - piece.bytes.data());
    filled_[piece.bytes.data()] = std::max(filled_[piece.bytes.data()], piece.zeros_from);
  }

 private:
  /// Zeroes what an earlier piece has left here. Makes all pages resident if they will be filled:
  /// others read as zeros without memory.
  void clear(HostBytes bytes, bool will_be_filled) {
    const auto found = filled_.find(bytes.data());
    const Bytes used = found == filled_.end() ? 0 : std::min(found->second, bytes.size());
    constexpr Bytes kUnit = 256 * kKiB;
    team_.for_ranges((bytes.size() + kUnit - 1) / kUnit, [&](Elems first, Elems last) {
      const Bytes begin = first * kUnit;
      const Bytes end = std::min(bytes.size(), last * kUnit);
      if (begin < used) std::memset(bytes.data() + begin, 0, std::min(used, end) - begin);
      if (found != filled_.end() || !will_be_filled) return;
      for (Bytes page = begin; page < end; page += kPage) bytes[page] = std::byte{0};
    });
  }

  [[nodiscard]] bool has_remainders(const model::TensorSpec& tensor) const {
    return !source_.read || !source_.is_bf16 || !source_.is_bf16(tensor);
  }
  [[nodiscard]] bool has_remainders(std::size_t block) const {
    const auto& tensors = blueprint_.model.blocks[block].tensors;
    return std::any_of(tensors.begin(), tensors.end(),
                       [this](const auto& tensor) { return has_remainders(tensor); });
  }

  /// Calls `put(i, masters)` for those of `count` elements from `first` on that are in a tensor,
  /// some at a time; the first one is element `first + i` of the block. Padding between tensors
  /// stays zero, and so do, without `weights`, remainders of tensors that have none.
  template <class Put>
  void for_masters(std::size_t block, Elems first, Elems count, bool weights, Put put) const {
    const Elems end = first + count;
    team_.for_ranges((count + kAtATime - 1) / kAtATime, [&](Elems from, Elems to) {
      std::vector<float> values;
      const Elems begin = first + from * kAtATime;
      const Elems stop = std::min(end, first + to * kAtATime);
      for (const model::TensorSpec& tensor : blueprint_.model.blocks[block].tensors) {
        if (!weights && !has_remainders(tensor)) continue;
        const Elems tensor_end = std::min(stop, tensor.offset + tensor.size);
        for (Elems at = std::max(begin, tensor.offset); at < tensor_end; at += values.size()) {
          values.resize(std::min(kAtATime, tensor_end - at));
          make(tensor, at - tensor.offset, values);
          put(at - first, values);
        }
      }
    });
  }

  void make(const model::TensorSpec& tensor, Elems first, std::span<float> values) const {
    if (source_.read) return source_.read(tensor, first, values);
    model::initialize(tensor, seed_, first, values);
  }

  const Blueprint& blueprint_;
  const WeightSource& source_;
  std::uint64_t seed_;
  const cpu_adam::Updater& team_;
  /// By address of a place: the bytes at its start that may not be zero.
  std::map<const std::byte*, Bytes> filled_;
};

/// Collects masters of the elements whose states are here.
class MasterReader {
 public:
  /// `first`: index of the first element in the block.
  MasterReader(const Blueprint& blueprint, Elems first, std::span<float> masters)
      : blueprint_(blueprint), first_(first), masters_(masters) {}

  void read(const HomePiece& piece) {
    const HeldBlock held(blueprint_, piece.block, piece.sub_group);
    if (!piece.states && held.layout.split) {
      high_.resize(masters_.size());
      for_wanted<Bf16>(piece, 0, held.weights, [&](Elems i, Bf16 high) { high_[i] = high; });
    } else if (!piece.states) {
      for_wanted<float>(piece, 0, held.weights, [&](Elems i, float m) { masters_[i] = m; });
    } else if (held.layout.split) {
      for_wanted<std::uint16_t>(piece, held.layout.remainder.offset, held.shard,
                                [&](Elems i, std::uint16_t low) {
                                  masters_[i] = join_master({high_[i], low});
                                });
    }
  }

 private:
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
  std::span<float> masters_;
  std::vector<Bf16> high_;  ///< the weights, which come before the remainders
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
    if (!piece.states && !held.splits_weights) common_.add(piece.bytes);
  }

  /// Digests of this rank's shard and of the weights that every rank has.
  [[nodiscard]] std::array<std::uint64_t, 2> digests() const {
    state::RunningChecksum all;
    for (const auto& [array, hash] : own_) {
      const std::uint64_t digest = hash.digest();
      all.add(std::as_bytes(std::span(&digest, 1)));
    }
    return {all.digest(), common_.digest()};
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
  const ShardRange shard = rank_shard(blueprint, block);
  const auto read = [&](Elems from, std::span<float> masters) {
    MasterReader reader(blueprint, from, masters);
    perform(reading_plan(blueprint, block, 1),
            [&reader](const HomePiece& piece) { reader.read(piece); });
  };
  std::vector<float> values(count);
  if (shard.room == blueprint.model.blocks[block].elements) {
    read(first, values);
    return values;
  }
  std::vector<float> own(shard.room);
  read(shard.first, std::span(own).first(shard.elements));
  std::vector<float> all(ranks->world() * own.size());
  ranks->all_gather(std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(all)));
  for (std::size_t i = 0; i < values.size(); ++i) {
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
