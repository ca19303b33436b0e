#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "ballast/model/architecture.h"

#include "src/model/compute/tensor_offsets.h"
#include "src/model/spec/families/decoder.h"

namespace ballast::model {

/// Tensors of a LatentSpec in a block, and its widths.
struct LatentAt {
  std::optional<LinearAt> query_down;
  NormAt query_norm;  ///< only with query_down
  LinearAt query;
  LinearAt down;
  NormAt norm;
  LinearAt up;
  std::size_t plain = 0;
  std::size_t rotating = 0;
  std::size_t values = 0;

  [[nodiscard]] std::size_t rank() const { return up.in; }
};

/// Finds the tensors of `spec`, whose queries are the map `query`.
inline LatentAt find_latent(const BlockSpec& block, const LatentSpec& spec, const LinearAt& query) {
  const auto norm = [&](const std::string& name) {
    NormAt at = find_norm(block, name);
    at.epsilon = static_cast<float>(spec.epsilon);
    return at;
  };
  LatentAt at = {.query = query,
                 .down = find_linear(block, spec.down),
                 .norm = norm(spec.norm),
                 .up = find_linear(block, spec.up),
                 .plain = spec.plain,
                 .rotating = spec.rotating,
                 .values = spec.values};
  // Adapters of the two maps of the layer's input are numbered together.
  if (spec.query_rank > 0) {
    at.query_down = find_linear(block, spec.query_down);
    at.query_norm = norm(spec.query_norm);
  }
  std::vector<LinearAt> same_input = {at.query_down ? *at.query_down : at.query, at.down};
  number_adapters(same_input);
  (at.query_down ? *at.query_down : at.query) = same_input.front();
  at.down = same_input.back();
  return at;
}

}  // namespace ballast::model
