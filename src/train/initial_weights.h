#pragma once

#include <span>

#include "ballast/config/config.h"
#include "ballast/model/architecture.h"
#include "ballast/train/weight_files.h"

namespace ballast::train {

/// Checks that model.weights, if it is given, names the safetensors files (WeightFiles) of exactly
/// the model's tensors. They may also hold the family's checkpoint_buffers() and, if the embeddings
/// are tied, a copy of the embedding as the output matrix. A config.json beside them must agree in
/// the family's checkpoint_keys(). Throws Error(config), Error(data) or Error(io) naming the key.
void check_initial_weights(const config::Config& config);

/// Fills `out` with the elements from `first` on of the tensor of the same name, in the order of
/// memory (model::StoredRows). Throws Error(data)
/// naming the file: no such tensor, another shape, a dtype that is not one of weights; Error(io).
void read_initial_weights(const WeightFiles& files, const model::TensorSpec& tensor, Elems first,
                          std::span<float> out);

}  // namespace ballast::train
