#include "src/engine/initial_magnitudes.h"

#include <algorithm>
#include <cmath>

#include "src/engine/in_units.h"

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

}  // namespace ballast::engine
