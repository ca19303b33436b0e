#pragma once

namespace ballast::schedule {

/// Arithmetic of a training step with recomputation: 2 FLOP per parameter and token in the forward
/// pass, 2 in its repetition, 4 in the backward pass.
inline constexpr double kFlopsPerParameterAndToken = 8.0;

/// NVMe traffic per parameter and step when the AdamW states of bf16 training live there: remainder
/// (2 bytes) and two fp32 moments are read and written back.
inline constexpr double kNvmeStateBytesPerParameter = 20.0;

/// T*, the tokens per step from which moving `bytes_per_parameter` per step takes no longer than
/// the computation that it is hidden behind: bytes / 8 x F / B. The size of the model does not
/// matter. `flops_per_second` (F): what the computation achieves. `bytes_per_second` (B): what the
/// tier moves, both directions counted if `bytes_per_parameter` counts both. All above 0; throws
/// Error(state) otherwise.
double tokens_to_hide(double bytes_per_parameter, double flops_per_second, double bytes_per_second);

}  // namespace ballast::schedule
