#pragma once

namespace ballast::model {

/// The attention implementation of the CUDA device: Ballast's kernels, or cuDNN for the bf16
/// forward pass. The implementations differ in the bits of their results.
enum class AttentionBackend {
  best,   ///< cuDNN if available
  own,    ///< Ballast's kernels
  cudnn,  ///< cuDNN; an Error if it is not available
};

}  // namespace ballast::model
