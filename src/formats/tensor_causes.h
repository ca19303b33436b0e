#pragma once

#include <span>
#include <string>

#include "ballast/formats/stored_weights.h"

// Why files of weights do not have the tensors of the model, for messages. Texts begin with ", " or
// ": " and are empty if no cause is known.

namespace ballast::formats {

/// The reason why a model whose tensors are `tensors` has no tensor `name`: a prefix of
/// torch.compile, DDP or FSDP, a PEFT model that is not merged, a model of text and images, or
/// quantised weights.
std::string cause_of_missing(std::span<const WeightPlace> tensors, const std::string& name);

/// The owner of a tensor that the model does not use.
std::string cause_of_unused(const std::string& name);

}  // namespace ballast::formats
