#include "src/engine/saved_states.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <utility>

#include "ballast/core/error.h"

namespace ballast::engine {
namespace {

constexpr std::array<std::string_view, 8> kNames = {
    "weights",        "remainders",      "masters",          "first_moments",
    "second_moments", "first_exponents", "second_exponents", "codes"};

/// Those that are kept, in ascending order.
std::vector<std::pair<StateKind, StateArray>> state_arrays(const StateLayout& layout) {
  std::vector<std::pair<StateKind, StateArray>> arrays;
  const StateKind master = layout.type == DType::bf16 ? StateKind::remainders : StateKind::masters;
  for (const auto& entry :
       {std::pair{master, layout.master}, std::pair{StateKind::first_moments, layout.first},
        std::pair{StateKind::second_moments, layout.second},
        std::pair{StateKind::first_exponents, layout.first_exponents},
        std::pair{StateKind::second_exponents, layout.second_exponents}}) {
    if (entry.second.bytes > 0) arrays.push_back(entry);
  }
  return arrays;
}

bool is_exponents(StateKind kind) {
  return kind == StateKind::first_exponents || kind == StateKind::second_exponents;
}

/// Entries of an array of a block, all of one expert, under the number of the expert.
StateRange range_of(const Blueprint& blueprint, std::size_t block, const HeldArray& array,
                    Elems first, Elems count) {
  const model::BlockSpec& spec = blueprint.model.blocks[block];
  if (spec.experts == 1) return {spec.number, array.kind, first, count, array.width};
  const Elems own = spec.own_elements();
  const Elems size = entries_of(array.kind, {0, own, own}).room;
  return {spec.number + first / size, array.kind, first % size, count, array.width};
}

/// This rank's part of the bytes of codes: what is in its shard of the block.
ShardRange own_codes(const Blueprint& blueprint, const HeldBlock& held, std::size_t block) {
  const Bytes shard = held.sizes.weight_shard(static_cast<std::uint32_t>(block));
  const Bytes before = held.weights.elements * held.width;
  const Bytes all = before + held.code_bytes;
  const Bytes begin = std::clamp(held.sizes.shard_of(blueprint.rank) * shard, before, all);
  const Bytes end = std::clamp((held.sizes.shard_of(blueprint.rank) + 1) * shard, before, all);
  return {begin - before, end - begin, end - begin};
}

/// This rank's part of the arrays of a home when states are split over all ranks, each with the
/// offset of its first byte in the home.
std::vector<std::pair<StateRange, Bytes>> own_arrays(const Blueprint& blueprint,
                                                     const HeldBlock& held, std::size_t block,
                                                     bool states) {
  const ShardRange own = even_shard(blueprint, block, states);
  std::vector<std::pair<StateRange, Bytes>> arrays;
  for (const HeldArray& array : held_arrays(held, states)) {
    const ShardRange entries = array.kind == StateKind::codes ? own_codes(blueprint, held, block)
                                                              : entries_of(array.kind, own);
    const Elems first = std::max(entries.first, array.first);
    const Elems end = std::min(entries.first + entries.elements, array.first + array.count);
    if (first >= end) continue;
    arrays.emplace_back(range_of(blueprint, block, array, first, end - first),
                        array.offset + (first - array.first) * array.width);
  }
  return arrays;
}

/// KeptHome::sub_group of frozen weights whose trained neighbours have a home of their own.
constexpr std::uint32_t kFrozenPart = 1;

/// What of `ranges` is in bytes [begin, end) of their home, with offsets from `begin` on.
std::vector<std::pair<StateRange, Bytes>> part_of(
    const std::vector<std::pair<StateRange, Bytes>>& ranges, Bytes begin, Bytes end) {
  std::vector<std::pair<StateRange, Bytes>> parts;
  for (const auto& [range, offset] : ranges) {
    const Bytes from = std::max(begin, offset);
    const Bytes to = std::min(end, offset + range.bytes());
    if (from >= to) continue;
    parts.emplace_back(
        StateRange{range.block, range.kind, range.first + (from - offset) / range.width,
                   (to - from) / range.width, range.width},
        from - begin);
  }
  return parts;
}

/// The homes of a block's weights and states that are on one of `homes`.
std::vector<KeptHome> homes_of(const Blueprint& blueprint, std::size_t block,
                               schedule::Homes homes) {
  const schedule::Schedule& schedule = blueprint.schedule;
  std::vector<KeptHome> found;
  const auto add_weights = [&](schedule::BufferId home, std::uint32_t part, Bytes begin,
                               Bytes end) {
    if (!homes.has(schedule.buffers.at(home).tier)) return;
    const auto arrays = own_arrays(blueprint, HeldBlock(blueprint, block, 0), block, false);
    found.push_back({block, false, part, {}, part_of(arrays, begin, end)});
  };
  const schedule::RankSizes sizes(blueprint.workload);
  const auto number = static_cast<std::uint32_t>(block);
  const Bytes all = sizes.weights(number);
  const schedule::BufferId trained = schedule.trained_home.at(block);
  const Bytes before = trained == schedule::kNoBuffer ? 0 : sizes.updated_by_all(number);
  if (before > 0) add_weights(trained, 0, 0, before);
  add_weights(schedule.weight_home.at(block), before > 0 ? kFrozenPart : 0, before, all);
  if (!homes.has(blueprint.placement.blocks[block].optimizer)) return found;
  for (std::uint32_t group = 0; group < sub_groups(blueprint, block); ++group) {
    const HeldBlock held(blueprint, block, group);
    found.push_back({block, true, group, {}, own_arrays(blueprint, held, block, true)});
  }
  return found;
}

}  // namespace

std::string_view to_string(StateKind kind) noexcept {
  return kNames[static_cast<std::size_t>(kind)];
}

std::optional<StateKind> state_kind(std::string_view name) noexcept {
  const auto* const found = std::find(kNames.begin(), kNames.end(), name);
  if (found == kNames.end()) return std::nullopt;
  return static_cast<StateKind>(found - kNames.begin());
}

ShardRange entries_of(StateKind kind, const ShardRange& elements) {
  using cpu_adam::Codes;
  if (!is_exponents(kind)) return elements;
  return {Codes::exponents_of(elements.first), Codes::exponents_of(elements.elements),
          Codes::exponents_of(elements.room)};
}

std::vector<HeldArray> held_arrays(const HeldBlock& held, bool states) {
  if (!states) {
    const Elems plain = held.weights.elements;
    std::vector<HeldArray> arrays = {
        {StateKind::weights, 0, held.width, held.weights.first, plain}};
    if (held.code_bytes > 0) {
      arrays.push_back({StateKind::codes, plain * held.width, 1, 0, held.code_bytes});
    }
    return arrays;
  }
  std::vector<HeldArray> arrays;
  for (const auto& [kind, array] : state_arrays(held.layout)) {
    const ShardRange entries = entries_of(kind, held.shard);
    if (entries.elements == 0) continue;
    arrays.push_back(
        {kind, array.offset, array.bytes / entries.room, entries.first, entries.elements});
  }
  return arrays;
}

std::vector<StateRange> whole_ranges(const Blueprint& blueprint) {
  std::vector<StateRange> ranges;
  for (const model::BlockSpec& block : model::blocks_without_expert_parallelism(blueprint.model)) {
    const Elems plain = block.plain_elements();
    if (plain > 0) {
      ranges.push_back({block.number, StateKind::weights, 0, plain, size_of(blueprint.type)});
    }
    const Elems trained = block.trained_elements();
    for (const auto& [kind, array] : state_arrays({blueprint.type, blueprint.states, trained})) {
      const Elems entries = entries_of(kind, {0, trained, trained}).elements;
      ranges.push_back({block.number, kind, 0, entries, array.bytes / entries});
    }
    const Bytes codes = model::BlockCodes(blueprint.model, block).bytes;
    if (codes > 0) ranges.push_back({block.number, StateKind::codes, 0, codes, 1});
  }
  return ranges;
}

void for_own_entries(const Blueprint& blueprint, const HeldBlock& held, const HomePiece& piece,
                     const StateSink& take) {
  for (const auto& [range, offset] : own_arrays(blueprint, held, piece.block, piece.states)) {
    const Overlap here(piece, offset, range.width, range.count);
    if (here.count == 0) continue;
    take({range.block, range.kind, range.first + here.first, here.count, range.width}, here.bytes);
  }
}

std::vector<StateRange> saved_ranges(const Blueprint& blueprint, schedule::Homes homes) {
  std::vector<StateRange> ranges;
  for (std::size_t b = 0; b < blueprint.model.blocks.size(); ++b) {
    for (const KeptHome& home : homes_of(blueprint, b, homes)) {
      for (const auto& [range, offset] : home.ranges) ranges.push_back(range);
    }
  }
  return ranges;
}

std::vector<KeptHome> homes_on(const Blueprint& blueprint, Tier tier) {
  std::vector<KeptHome> homes;
  for (std::size_t b = 0; b < blueprint.model.blocks.size(); ++b) {
    for (KeptHome& home : homes_of(blueprint, b, schedule::homes_on(tier))) {
      homes.push_back(std::move(home));
    }
  }
  return homes;
}

schedule::BufferId buffer_of(const Blueprint& blueprint, const KeptHome& home) {
  const schedule::Schedule& schedule = blueprint.schedule;
  if (!home.states) {
    const schedule::BufferId trained = schedule.trained_home.at(home.block);
    const bool frozen = trained == schedule::kNoBuffer || home.sub_group == kFrozenPart;
    return frozen ? schedule.weight_home.at(home.block) : trained;
  }
  return schedule.state_home.at(home.block).at(home.sub_group);
}

std::vector<KeptHome> host_homes_by_update(const Blueprint& blueprint) {
  const std::vector<schedule::Operation>& operations = blueprint.schedule.steady.operations;
  std::map<schedule::BufferId, std::size_t> first_write;
  for (std::size_t i = 0; i < operations.size(); ++i) {
    for (const schedule::Use& use : operations[i].uses) {
      if (use.writes) first_write.emplace(use.buffer, i);
    }
  }
  const auto written_at = [&](const KeptHome& home) {
    const auto found = first_write.find(buffer_of(blueprint, home));
    return found == first_write.end() ? operations.size() : found->second;
  };
  std::vector<KeptHome> homes = homes_on(blueprint, Tier::host);
  std::stable_sort(homes.begin(), homes.end(), [&](const KeptHome& one, const KeptHome& other) {
    return written_at(one) < written_at(other);
  });
  return homes;
}

bool same_homes(const std::vector<KeptHome>& one, const std::vector<KeptHome>& other) {
  return std::equal(one.begin(), one.end(), other.begin(), other.end(),
                    [](const KeptHome& a, const KeptHome& b) {
                      return a.block == b.block && a.states == b.states &&
                             a.sub_group == b.sub_group && a.ranges == b.ranges;
                    });
}

void save_states(const Blueprint& blueprint, const StateSink& sink, const Perform& perform,
                 schedule::Homes homes) {
  const auto blocks = static_cast<std::uint32_t>(blueprint.model.blocks.size());
  perform(schedule::build_read(blueprint.workload, blueprint.placement, blueprint.options, 0,
                               blocks, homes),
          [&](const HomePiece& piece) {
            for_own_entries(blueprint, HeldBlock(blueprint, piece.block, piece.sub_group), piece,
                            sink);
          });
}

void restore_states(const Blueprint& blueprint, const StateSource& source, const Perform& perform,
                    schedule::Homes homes) {
  schedule::Workload work = blueprint.workload;
  for (schedule::BlockWork& block : work.blocks) {
    for (schedule::SubGroup& group : block.sub_groups) {
      group.initial_state_bytes = group.state_bytes;
    }
  }
  perform(schedule::build_fill(work, blueprint.placement, blueprint.options, homes),
          [&](const HomePiece& piece) {
            std::memset(piece.bytes.data(), 0, piece.bytes.size());
            const HeldBlock held(blueprint, piece.block, piece.sub_group);
            for (const HeldArray& array : held_arrays(held, piece.states)) {
              const Overlap here(piece, array.offset, array.width, array.count);
              if (here.count == 0) continue;
              source(range_of(blueprint, piece.block, array, array.first + here.first, here.count),
                     here.bytes);
            }
          });
}

}  // namespace ballast::engine
