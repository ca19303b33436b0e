#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "ballast/core/dtype.h"
#include "ballast/core/gradient_stats.h"
#include "ballast/core/view.h"

namespace ballast::model {

/// Gradients of the rows of a table that the tokens of a micro-batch have selected: [tokens,
/// width].
struct RowGradients {
  std::span<const float> rows;
  std::span<const std::int32_t> tokens;
};

/// Packs the gradient of a table in host memory: adds up the gradients of each row of the table in
/// the order of micro-batches and tokens, in fp32, and rounds the sums to `type` (nearest even).
/// Rows without a token become zero, and the row of the token `pad`. `packed`: the table's rows
/// [size, width] in `type`; each token is below `size`. Returns the statistics of the packed
/// values, summed in the order of rows.
GradientStats scatter_rows(DType type, std::span<const RowGradients> micro_batches,
                           std::size_t width, HostBytes packed,
                           std::optional<std::int32_t> pad = {});

}  // namespace ballast::model
