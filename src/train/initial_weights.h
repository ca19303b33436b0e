#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/engine/engine.h"
#include "ballast/formats/weight_files.h"
#include "ballast/model/architecture.h"

#include "src/formats/weight_reader.h"

namespace ballast::train {

/// Checks that model.weights, if it is given, names the safetensors files (WeightFiles) of exactly
/// the model's tensors. They may also hold the family's checkpoint_buffers() and, if the embeddings
/// are tied, a copy of the embedding as the output matrix. A config.json beside them must agree in
/// the family's checkpoint_keys(). A folder at ballast.adapters.path must hold the trained tensors.
/// Throws Error(config), Error(data) or Error(io) naming the key.
void check_initial_weights(const config::Config& config);

/// Where a tensor of the model is. Throws Error(data) naming the file: no such tensor, or another
/// shape.
const formats::WeightPlace& place_of(const formats::WeightFiles& files,
                                     const model::TensorSpec& tensor);

/// Fills `out` with the elements from `first` on of the tensor at `place`, in the order of memory
/// (model::StoredRows) and in the type of the place. `reader` is one of the same files. Throws
/// Error(data) naming the file: too short, or a dtype that is not one of weights; Error(io).
void read_stored_weights(const formats::WeightPlace& place, formats::WeightReader& reader,
                         const model::TensorSpec& tensor, Elems first, HostBytes out);
/// The same, as fp32.
void read_initial_weights(const formats::WeightPlace& place, formats::WeightReader& reader,
                          const model::TensorSpec& tensor, Elems first, std::span<float> out);

/// What a reader of both functions should read ahead, in the order in which the fill asks for it:
/// for the maps of a block whose norms it needs if it `makes_magnitudes` (DoRA), for the weights,
/// then for their masters in training in the type `masters_of`.
std::vector<formats::ReadAhead::Source> reading_order(const formats::WeightFiles& files,
                                                      const model::Architecture& model,
                                                      std::optional<DType> masters_of,
                                                      bool makes_magnitudes = false);

/// Starts `engine` with model.weights (WeightFiles) and the adapters of ballast.adapters.path; what
/// these lack is drawn from the seed. Calls `reading`, one call at a time, with the bytes that are
/// read and those of the whole. Throws like engine::Engine::start() and read_initial_weights().
void start_from_weights(engine::Engine& engine, const config::Config& config,
                        const std::function<void(Bytes done, Bytes total)>& reading);

}  // namespace ballast::train
