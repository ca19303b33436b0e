#pragma once

namespace ballast::plan {

/// Work of a training step with recomputation: 2 FLOP per parameter and token in the forward pass,
/// 2 in its repetition, 4 in the backward pass.
inline constexpr double kFlopsPerParameterAndToken = 8.0;

/// NVMe traffic per parameter and step if the AdamW states of bf16 training are there: remainder (2
/// bytes) and two fp32 moments are read and written back.
inline constexpr double kNvmeStateBytesPerParameter = 20.0;

/// Returns T*, the minimum number of tokens per step at which computation hides moving
/// `bytes_per_parameter` per step: bytes / 8 x F / B, for every model size. `flops_per_second` (F):
/// achieved by the computation. `bytes_per_second` (B): bandwidth of the tier; counts both
/// directions if `bytes_per_parameter` does. All must be above 0, else throws Error(state).
double tokens_to_hide(double bytes_per_parameter, double flops_per_second, double bytes_per_second);

}  // namespace ballast::plan
