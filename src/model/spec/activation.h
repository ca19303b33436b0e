#pragma once

namespace ballast::model {

/// Activation functions of MLPs.
enum class Activation { gelu_tanh, gelu, silu };

}  // namespace ballast::model
