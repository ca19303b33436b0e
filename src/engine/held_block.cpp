#include "src/engine/held_block.h"

#include <algorithm>
#include <utility>

namespace ballast::engine {
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

}  // namespace ballast::engine
