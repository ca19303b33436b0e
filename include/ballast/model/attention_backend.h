#pragma once

namespace ballast::model {

/// The attention implementation of the CUDA device: own kernels, or cuDNN for the bf16 forward
/// pass. Results of different implementations differ in their bits.
enum class AttentionBackend {
  best,   ///< cuDNN if available
  own,    ///< own kernels
  cudnn,  ///< cuDNN, or an Error
};

}  // namespace ballast::model
