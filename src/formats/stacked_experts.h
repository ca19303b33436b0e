#pragma once

#include <string>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/formats/stored_tensor.h"

namespace ballast::formats {

/// The matrices of separate experts in a tensor that stacks those of all experts of a layer, under
/// the names that they have in folders with a tensor per expert. PREFIX.experts.gate_up_proj
/// [E, 2 I, H] has PREFIX.experts.NUMBER.gate_proj.weight [I, H] and then up_proj.weight, for one
/// expert after the other; PREFIX.experts.down_proj [E, H, I] has down_proj.weight [H, I]. Empty
/// for every other tensor. Offsets are those in the file. Source: the classes of transformers 5,
/// whose mapping "qwen2_moe" stacks such matrices when it loads a model.
std::vector<StoredTensor> matrices_of_experts(const StoredTensor& tensor);

}  // namespace ballast::formats
