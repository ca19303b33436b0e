#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <map>
#include <span>
#include <utility>

#include "ballast/core/error.h"
#include "ballast/engine/run_states.h"
#include "ballast/state/checksum.h"

#include "src/engine/held_states.h"

namespace ballast::engine {

namespace {

constexpr std::array<std::string_view, 8> kNames = {
    "weights",        "remainders",      "masters",          "first_moments",
    "second_moments", "first_exponents", "second_exponents", "codes"};

}  // namespace

std::string_view to_string(StateKind kind) noexcept {
  return kNames[static_cast<std::size_t>(kind)];
}

std::optional<StateKind> state_kind(std::string_view name) noexcept {
  const auto* const found = std::find(kNames.begin(), kNames.end(), name);
  if (found == kNames.end()) return std::nullopt;
  return static_cast<StateKind>(found - kNames.begin());
}

namespace {

/// Returns the elements whose weights are here; they include the rank's shard.
ShardRange weights_here(const Blueprint& blueprint, const step::RankSizes& sizes,
                        std::size_t block) {
  const Elems whole = blueprint.own().blocks[block].plain_elements();
  const auto number = static_cast<std::uint32_t>(block);
  if (!sizes.keeps_part_of_weights(number)) return {0, whole, whole};
  if (!sizes.shards_weights(number)) return even_shard(blueprint, block, false);
  const Elems room = sizes.resident_weights(number) / size_of(blueprint.type);
  const Elems first = std::min(whole, blueprint.mesh.sharer() % sizes.ranks_per_copy() * room);
  return {first, std::min(room, whole - first), room};
}

bool is_exponents(StateKind kind) {
  return kind == StateKind::first_exponents || kind == StateKind::second_exponents;
}

}  // namespace

HeldBlock::HeldBlock(const Blueprint& blueprint, std::size_t block, std::uint32_t sub_group)
    : sizes(blueprint.problem),
      keeps_part(sizes.keeps_part_of_weights(static_cast<std::uint32_t>(block))),
      width(size_of(blueprint.type)),
      layout(state_layout(blueprint, block, sub_group)),
      shard(sub_group_range(blueprint, block, sub_group)),
      weights(weights_here(blueprint, sizes, block)),
      code_bytes(model::BlockCodes(blueprint.own(), blueprint.own().blocks[block]).bytes) {}

HeldArray HeldArray::entries(Elems begin, Elems end) const {
  const Elems from = std::max(begin, first);
  const Elems to = std::min(end, first + count);
  if (from >= to) return {kind, offset, width, first, 0};
  return {kind, offset + (from - first) * width, width, from, to - from};
}

HeldArray HeldArray::between(Bytes begin, Bytes end) const {
  const Bytes from = std::clamp(begin, offset, offset + bytes());
  const Bytes to = std::clamp(end, offset, offset + bytes());
  return entries(first + (from - offset) / width, first + (to - offset) / width);
}

ShardRange entries_of(StateKind kind, const ShardRange& elements) {
  using cpu_adam::Codes;
  if (!is_exponents(kind)) return elements;
  return {Codes::exponents_of(elements.first), Codes::exponents_of(elements.elements),
          Codes::exponents_of(elements.room)};
}

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

std::vector<HeldArray> held_arrays(const HeldBlock& held, bool states) {
  std::vector<HeldArray> arrays;
  const auto add = [&arrays](const HeldArray& array) {
    if (array.count > 0) arrays.push_back(array);
  };
  if (!states) {
    const Elems plain = held.weights.elements;
    add({StateKind::weights, 0, held.width, held.weights.first, plain});
    add({StateKind::codes, plain * held.width, 1, 0, held.code_bytes});
    return arrays;
  }
  for (const auto& [kind, array] : state_arrays(held.layout)) {
    const ShardRange entries = entries_of(kind, held.shard);
    add({kind, array.offset, array.bytes / entries.room, entries.first, entries.elements});
  }
  return arrays;
}

std::vector<PieceArray> arrays_in(const HomePiece& piece, const std::vector<HeldArray>& arrays) {
  std::vector<PieceArray> found;
  for (const HeldArray& array : arrays) {
    const HeldArray here = array.between(piece.offset, piece.offset + piece.bytes.size());
    if (here.count == 0) continue;
    found.push_back({here, piece.bytes.subspan(here.offset - piece.offset, here.bytes())});
  }
  return found;
}

namespace {

/// Returns entries of an array of a block, all of one expert, under the number of the expert.
StateRange range_of(const Blueprint& blueprint, std::size_t block, const HeldArray& array) {
  const model::BlockSpec& spec = blueprint.own().blocks[block];
  if (spec.pieces == 1) return {spec.number, array.kind, array.first, array.count, array.width};
  const Elems own = spec.own_elements();
  const Elems size = entries_of(array.kind, {0, own, own}).room;
  return {spec.number + array.first / size, array.kind, array.first % size, array.count,
          array.width};
}

/// Returns this rank's part of the bytes of codes: those in its shard of the block.
ShardRange own_codes(const Blueprint& blueprint, const HeldBlock& held, std::size_t block) {
  const Bytes shard = held.sizes.weight_shard(static_cast<std::uint32_t>(block));
  const Bytes before = held.weights.elements * held.width;
  const Bytes all = before + held.code_bytes;
  const Bytes begin = std::clamp(held.sizes.shard_of(blueprint.mesh.sharer()) * shard, before, all);
  const Bytes end =
      std::clamp((held.sizes.shard_of(blueprint.mesh.sharer()) + 1) * shard, before, all);
  return {begin - before, end - begin, end - begin};
}

/// Returns this rank's part of the arrays of weights or states if states are split over all ranks.
/// The bytes are equal in every stage.
std::vector<HeldArray> own_arrays(const Blueprint& blueprint, const HeldBlock& held,
                                  std::size_t block, bool states) {
  const ShardRange own = even_shard(blueprint, block, states);
  std::vector<HeldArray> arrays;
  // All tensor places have the blocks without tiles; the first one saves them.
  const bool in_tiles = blueprint.model.blocks[block].pieces > 1;
  if (blueprint.mesh.tensor_place() > 0 && !in_tiles) return arrays;
  for (const HeldArray& array : held_arrays(held, states)) {
    const ShardRange entries = array.kind == StateKind::codes ? own_codes(blueprint, held, block)
                                                              : entries_of(array.kind, own);
    const HeldArray part = array.entries(entries.first, entries.first + entries.elements);
    if (part.count > 0) arrays.push_back(part);
  }
  return arrays;
}

/// KeptHome::sub_group of frozen weights, if the trained ones have a separate home.
constexpr std::uint32_t kFrozenPart = 1;

/// Returns the homes of a block's weights and states that are on one of `homes`.
std::vector<KeptHome> homes_of(const Blueprint& blueprint, std::size_t block, step::Homes homes) {
  const plan::Schedule& schedule = blueprint.schedule;
  std::vector<KeptHome> found;
  const auto add = [&](bool states, std::uint32_t part, Bytes begin, Bytes end) {
    KeptHome home = {.block = block, .states = states, .sub_group = part};
    if (!homes.has(schedule.buffers.at(buffer_of(blueprint, home)).tier)) return;
    const HeldBlock held(blueprint, block, states ? part : 0);
    for (const HeldArray& whole : own_arrays(blueprint, held, block, states)) {
      const HeldArray array = whole.between(begin, end);
      if (array.count == 0) continue;
      home.ranges.emplace_back(range_of(blueprint, block, array), array.offset - begin);
    }
    found.push_back(std::move(home));
  };
  const step::RankSizes sizes(blueprint.problem);
  const auto number = static_cast<std::uint32_t>(block);
  const Bytes all = sizes.resident_weights(number);
  const bool apart = schedule.trained_home.at(block) != plan::kNoBuffer;
  const Bytes trained = apart ? sizes.trained_weights(number) : 0;
  if (trained > 0) add(false, 0, 0, trained);
  add(false, trained > 0 ? kFrozenPart : 0, trained, all);
  for (std::uint32_t group = 0; group < sub_groups(blueprint, block); ++group) {
    add(true, group, 0, std::numeric_limits<Bytes>::max());
  }
  return found;
}

}  // namespace

std::vector<StateRange> whole_ranges(const Blueprint& blueprint) {
  std::vector<StateRange> ranges;
  for (const model::BlockSpec& block : model::whole_blocks(blueprint.model)) {
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
  const auto own = own_arrays(blueprint, held, piece.block, piece.states);
  for (const PieceArray& here : arrays_in(piece, own)) {
    take(range_of(blueprint, piece.block, here.array), here.bytes);
  }
}

std::vector<StateRange> saved_ranges(const Blueprint& blueprint, step::Homes homes) {
  std::vector<StateRange> ranges;
  for (std::size_t b = 0; b < blueprint.own().blocks.size(); ++b) {
    for (const KeptHome& home : homes_of(blueprint, b, homes)) {
      for (const auto& [range, offset] : home.ranges) ranges.push_back(range);
    }
  }
  return ranges;
}

std::vector<KeptHome> homes_on(const Blueprint& blueprint, Tier tier) {
  std::vector<KeptHome> homes;
  for (std::size_t b = 0; b < blueprint.own().blocks.size(); ++b) {
    for (KeptHome& home : homes_of(blueprint, b, step::homes_on(tier))) {
      homes.push_back(std::move(home));
    }
  }
  return homes;
}

plan::BufferId buffer_of(const Blueprint& blueprint, const KeptHome& home) {
  const plan::Schedule& schedule = blueprint.schedule;
  if (!home.states) {
    const plan::BufferId trained = schedule.trained_home.at(home.block);
    const bool frozen = trained == plan::kNoBuffer || home.sub_group == kFrozenPart;
    return frozen ? schedule.weight_home.at(home.block) : trained;
  }
  return schedule.state_home.at(home.block).at(home.sub_group);
}

std::vector<KeptHome> host_homes_by_update(const Blueprint& blueprint) {
  const std::vector<plan::Operation>& operations = blueprint.schedule.steady.operations;
  std::map<plan::BufferId, std::size_t> first_write;
  for (std::size_t i = 0; i < operations.size(); ++i) {
    for (const plan::Use& use : operations[i].uses) {
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

std::vector<StateRange> background_ranges(const Blueprint& blueprint) {
  std::vector<StateRange> ranges;
  for (const KeptHome& home : host_homes_by_update(blueprint)) {
    for (const auto& [range, offset] : home.ranges) ranges.push_back(range);
  }
  return ranges;
}

bool same_homes(const std::vector<KeptHome>& one, const std::vector<KeptHome>& other) {
  return std::equal(one.begin(), one.end(), other.begin(), other.end(),
                    [](const KeptHome& a, const KeptHome& b) {
                      return a.block == b.block && a.states == b.states &&
                             a.sub_group == b.sub_group && a.ranges == b.ranges;
                    });
}

void save_states(const Blueprint& blueprint, const StateSink& sink, const Perform& perform,
                 step::Homes homes) {
  const auto blocks = static_cast<std::uint32_t>(blueprint.own().blocks.size());
  perform(
      step::build_read(blueprint.problem, blueprint.placement, blueprint.options, 0, blocks, homes),
      [&](const HomePiece& piece) {
        for_own_entries(blueprint, HeldBlock(blueprint, piece.block, piece.sub_group), piece, sink);
      });
}

void restore_states(const Blueprint& blueprint, const StateSource& source, const Perform& perform,
                    step::Homes homes) {
  step::Problem problem = blueprint.problem;
  for (step::BlockSizes& block : problem.blocks) {
    for (step::SubGroup& group : block.sub_groups) {
      group.initial_state_bytes = group.state_bytes;
    }
  }
  perform(step::build_fill(problem, blueprint.placement, blueprint.options, homes),
          [&](const HomePiece& piece) {
            std::memset(piece.bytes.data(), 0, piece.bytes.size());
            const HeldBlock held(blueprint, piece.block, piece.sub_group);
            for (const PieceArray& here : arrays_in(piece, held_arrays(held, piece.states))) {
              source(range_of(blueprint, piece.block, here.array), here.bytes);
            }
          });
}

}  // namespace ballast::engine
