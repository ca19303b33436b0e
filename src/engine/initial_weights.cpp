#include "src/engine/initial_weights.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <span>
#include <string>

#include <fmt/format.h>

#include "ballast/comm/agreement.h"
#include "ballast/state/checksum.h"

#include "src/engine/held_states.h"

namespace ballast::engine {

namespace {

/// Elements of rows that a thread reads at a time.
constexpr Elems kWeightsAtATime = Elems{1} << 14;
/// Columns of a map [in, out] that a thread processes at a time.
constexpr Elems kColumns = 512;

double square(float value) {
  return static_cast<double>(value) * value;
}

}  // namespace

bool InitialMagnitudes::lacks(const model::BlockSpec& block) const {
  return std::any_of(block.tensors.begin(), block.tensors.end(), [&](const auto& tensor) {
    return tensor.init == model::Init::row_norms && !norms_.contains(tensor.name);
  });
}

void InitialMagnitudes::make(const model::BlockSpec& block, const ReadMap& read) {
  for (const model::TensorSpec& tensor : block.tensors) {
    if (tensor.init != model::Init::row_norms) continue;
    const model::TensorSpec& map = model::map_of_magnitudes(block, tensor);
    const Elems out = tensor.size;
    const Elems in = map.size / out;
    std::vector<float>& norms = norms_[tensor.name];
    norms.resize(out);
    if (!model_.adapters->input_first) {
      in_units(team_, out, std::max<Elems>(1, kWeightsAtATime / in), [&](Elems from, Elems to) {
        std::vector<float> row(in);
        for (Elems i = from; i < to; ++i) {
          read(map, i * in, row);
          double sum = 0.0;
          for (const float value : row) sum += square(value);
          norms[i] = static_cast<float>(std::sqrt(sum));
        }
      });
      continue;
    }
    in_units(team_, out, kColumns, [&](Elems from, Elems to) {
      std::vector<float> part(to - from);
      std::vector<double> sums(to - from);
      for (Elems row = 0; row < in; ++row) {
        read(map, row * out + from, part);
        for (std::size_t i = 0; i < part.size(); ++i) sums[i] += square(part[i]);
      }
      for (std::size_t i = 0; i < part.size(); ++i) {
        norms[from + i] = static_cast<float>(std::sqrt(sums[i]));
      }
    });
  }
}

void InitialMagnitudes::copy(const model::TensorSpec& tensor, Elems first,
                             std::span<float> out) const {
  std::copy_n(norms_.at(tensor.name).begin() + static_cast<std::ptrdiff_t>(first), out.size(),
              out.begin());
}

namespace {

/// Returns the values of all ranks, by rank.
std::vector<std::uint64_t> gather(comm::Ranks& ranks, std::span<const std::uint64_t> own) {
  std::vector<std::uint64_t> all(own.size() * ranks.world());
  ranks.all_gather(std::as_bytes(own), std::as_writable_bytes(std::span(all)));
  return all;
}

}  // namespace

WholeWeights::WholeWeights(const Blueprint& blueprint, comm::Ranks* ranks)
    : blueprint_(blueprint), ranks_(ranks), digests_(blueprint.own().blocks.size()) {}

Perform WholeWeights::hashing(const Perform& perform) {
  if (ranks_ == nullptr) return perform;
  return [this, perform](const plan::Plan& plan, const Visitor& visitor) {
    perform(plan, [&](HomePiece& piece) {
      visitor(piece);
      add(piece);
    });
  };
}

void WholeWeights::add(const HomePiece& piece) {
  if (piece.states || HeldBlock(blueprint_, piece.block, piece.sub_group).keeps_part) return;
  std::uint64_t& digest = digests_[piece.block];
  const std::array<std::uint64_t, 2> both = {digest, state::checksum(piece.bytes)};
  digest = state::checksum(std::as_bytes(std::span(both)));
}

void WholeWeights::require_equal() const {
  if (ranks_ == nullptr) return;
  const Mesh& mesh = blueprint_.mesh;
  const std::uint64_t together = state::checksum(std::as_bytes(std::span(digests_)));
  const std::vector<std::uint64_t> all = gather(*ranks_, std::span(&together, 1));
  bool equal = true;
  for (std::uint32_t r = 0; r < mesh.ranks(); ++r) {
    equal = equal && all[r] == all[mesh.rank_of(0, r % mesh.tensor)];
  }
  if (equal) return;
  const std::vector<std::uint64_t> blocks = gather(*ranks_, digests_);
  const std::vector<std::string> hosts = comm::gather_texts(*ranks_, comm::host_name());
  for (std::size_t block = 0; block < digests_.size(); ++block) {
    for (std::uint32_t place = 0; place < mesh.tensor; ++place) {
      std::vector<std::uint64_t> digests;
      for (std::uint32_t s = 0; s < mesh.sharers(); ++s) {
        digests.push_back(blocks[mesh.rank_of(s, place) * digests_.size() + block]);
      }
      const auto [reference, others] = comm::find_minority(digests);
      // Zero: a rank has reused a home.
      if (others.empty() || std::count(digests.begin(), digests.end(), 0) > 0) continue;
      const std::size_t rank = mesh.rank_of(static_cast<std::uint32_t>(others.front()), place);
      const std::size_t right = mesh.rank_of(static_cast<std::uint32_t>(reference), place);
      throw comm::JointError(
          ErrorCategory::data,
          fmt::format("rank {} on {}: the weights of {} differ from those of rank {} on {}; copy "
                      "the same files to all nodes",
                      rank, hosts[rank], blueprint_.own().blocks[block].name, right, hosts[right]));
    }
  }
}

}  // namespace ballast::engine
