#include "src/offload/masters.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "ballast/core/dtype.h"

namespace ballast::offload {
namespace {

using cpu_adam::Shard;
using cpu_adam::Weights;

/// The arrays of bf16 weights from an element on.
struct SplitArrays {
  Bf16* weights;
  std::uint16_t* remainders;
  std::uint16_t* checks;
};

/// The arrays of fp16 weights from an element on.
struct CopyArrays {
  float* master;
  F16* weights;
};

bool is_split(const PartStates& states) {
  return states.shard.weights.format == Weights::Format::split;
}

bool is_copy(const PartStates& states) {
  return states.shard.weights.format == Weights::Format::copy_f16;
}

SplitArrays split_arrays(const PartStates& states, Elems first = 0) {
  auto* const weights = static_cast<Bf16*>(states.shard.weights.main);
  auto* const remainders =
      static_cast<std::uint16_t*>(states.shard.weights.remainder_or_copy);
  return {weights == nullptr ? nullptr : weights + first, remainders + first,
          states.checks + first / kCheckedWeights};
}

CopyArrays copy_arrays(const PartStates& states, Elems first = 0) {
  auto* const weights = static_cast<F16*>(states.shard.weights.remainder_or_copy);
  return {static_cast<float*>(states.shard.weights.main) + first,
          weights == nullptr ? nullptr : weights + first};
}

/// Returns the check value of kCheckedWeights weights: a multilinear hash, whose multipliers are
/// arbitrary odd numbers.
std::uint16_t check_of(const Bf16* weights) {
  static_assert(kCheckedWeights * sizeof(Bf16) == 2 * sizeof(std::uint64_t));
  std::array<std::uint64_t, 2> words = {};
  std::memcpy(words.data(), weights, sizeof words);
  const std::uint64_t sum =
      words[0] * 0x9e3779b97f4a7c15U + words[1] * 0xc2b2ae3d27d4eb4fU;
  return static_cast<std::uint16_t>(sum >> 48U);
}

/// Returns the check value of the last weights of a part, fewer than kCheckedWeights.
std::uint16_t check_of_last(const Bf16* weights, Elems count) {
  std::array<Bf16, kCheckedWeights> all = {};
  std::copy_n(weights, count, all.begin());
  return check_of(all.data());
}

/// Calls `work(first, count, check)` for each group of `count` weights.
void for_groups(const Bf16* weights, Elems count, const auto& work) {
  const Elems whole = count / kCheckedWeights * kCheckedWeights;
  for (Elems i = 0; i < whole; i += kCheckedWeights) {
    work(i, kCheckedWeights, check_of(weights + i));
  }
  if (whole < count) work(whole, count - whole, check_of_last(weights + whole, count - whole));
}

/// Writes remainders and check values of a master, and the weights it rounds to.
void split_values(std::span<const float> values, Bf16* weights, std::uint16_t* remainders,
                  std::uint16_t* checks) {
  for (Elems i = 0; i < values.size(); ++i) {
    const SplitMaster split = split_master(values[i]);
    weights[i] = split.weight;
    remainders[i] = split.remainder;
  }
  for_groups(weights, values.size(), [&](Elems first, Elems, std::uint16_t check) {
    checks[first / kCheckedWeights] = check;
  });
}

}  // namespace

PartStates part_of(const PartStates& states, Elems first, Elems count) {
  return {cpu_adam::part_of(states.shard, first, count),
          states.checks == nullptr ? nullptr : states.checks + first / kCheckedWeights};
}

bool follow_weights(const PartStates& states, Elems first, Elems count) {
  bool changed = false;
  if (is_split(states)) {
    const SplitArrays at = split_arrays(states, first);
    for_groups(at.weights, count, [&](Elems group, Elems size, std::uint16_t check) {
      if (check == at.checks[group / kCheckedWeights]) return;
      at.checks[group / kCheckedWeights] = check;
      std::fill_n(at.remainders + group, size, std::uint16_t{0});
      changed = true;
    });
  } else if (is_copy(states)) {
    const CopyArrays at = copy_arrays(states, first);
    for (Elems i = 0; i < count; ++i) {
      if (to_f16(at.master[i]) == at.weights[i]) continue;
      at.master[i] = to_float(at.weights[i]);
      changed = true;
    }
  }
  return changed;
}

void note_weights(const PartStates& states, Elems first, Elems count) {
  if (!is_split(states)) return;
  const SplitArrays at = split_arrays(states, first);
  for_groups(at.weights, count, [&](Elems group, Elems, std::uint16_t check) {
    at.checks[group / kCheckedWeights] = check;
  });
}

void forget_master(const PartStates& states) {
  if (is_split(states)) {
    std::fill_n(split_arrays(states).remainders, states.shard.size, std::uint16_t{0});
  } else if (is_copy(states)) {
    std::fill_n(copy_arrays(states).master, states.shard.size, 0.0F);
  }
}

void read_master(const PartStates& states, std::span<float> out) {
  if (is_split(states)) {
    const SplitArrays at = split_arrays(states);
    for_groups(at.weights, out.size(), [&](Elems group, Elems size, std::uint16_t check) {
      const bool kept = check == at.checks[group / kCheckedWeights];
      for (Elems i = group; i < group + size; ++i) {
        out[i] = join_master({at.weights[i], kept ? at.remainders[i] : std::uint16_t{0}});
      }
    });
  } else if (is_copy(states)) {
    const CopyArrays at = copy_arrays(states);
    for (Elems i = 0; i < out.size(); ++i) {
      const bool kept = to_f16(at.master[i]) == at.weights[i];
      out[i] = kept ? at.master[i] : to_float(at.weights[i]);
    }
  }
}

void write_master(const PartStates& states, std::span<const float> values, NewMaster mode) {
  const bool sets_weights = mode == NewMaster::sets_weights;
  if (is_split(states)) {
    const SplitArrays at = split_arrays(states);
    if (sets_weights) return split_values(values, at.weights, at.remainders, at.checks);
    std::array<Bf16, kCheckedWeights> weights = {};
    for (Elems i = 0; i < values.size(); i += kCheckedWeights) {
      const Elems count = std::min(kCheckedWeights, values.size() - i);
      split_values(values.subspan(i, count), weights.data(), at.remainders + i,
                   at.checks + i / kCheckedWeights);
    }
  } else if (is_copy(states)) {
    const CopyArrays at = copy_arrays(states);
    std::ranges::copy(values, at.master);
    if (!sets_weights) return;
    for (Elems i = 0; i < values.size(); ++i) at.weights[i] = to_f16(values[i]);
  }
}

void copy_master(const PartStates& from, const PartStates& to) {
  const Elems size = from.shard.size;
  if (is_split(from)) {
    std::copy_n(split_arrays(from).remainders, size, split_arrays(to).remainders);
    std::copy_n(from.checks, checks_of(size), to.checks);
  } else if (is_copy(from)) {
    std::copy_n(copy_arrays(from).master, size, copy_arrays(to).master);
  }
}

}  // namespace ballast::offload
