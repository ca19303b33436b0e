#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/core/dtype.h"
#include "ballast/core/memory.h"
#include "ballast/core/units.h"
#include "ballast/engine/engine.h"
#include "ballast/formats/weight_files.h"
#include "ballast/model/architecture.h"

#include "src/formats/weight_reader.h"

namespace ballast::train {

/// Checks that model.weights, if given, has safetensors files (WeightFiles) with exactly the
/// model's tensors. They may also have tensors that pass through (src/formats/folder_layout.h), the
/// family's checkpoint_buffers() and, if the embeddings are tied, a copy of the embedding as the
/// output matrix. A config.json next to them must agree in the
/// family's checkpoint_keys(). A folder at ballast.adapters.path must have the trained tensors.
/// Throws Error(config), Error(data) or Error(io) with the key.
void check_initial_weights(const config::Config& config);

/// Returns the place of a tensor of the model. Throws Error(data) with the file if it is missing or
/// has another shape.
const formats::WeightPlace& place_of(const formats::WeightFiles& files,
                                     const model::TensorSpec& tensor);

/// Fills `out` with the elements from `first` on of the tensor at `place`, in memory order
/// (model::StoredRows) and in the type of the place. `reader` must be one of the same files. Throws
/// Error(data) with the file if it is too short or has a dtype that weights cannot have; Error(io).
void read_stored_weights(const formats::WeightPlace& place, formats::WeightReader& reader,
                         const model::TensorSpec& tensor, Elems first, HostBytes out);
/// Like read_stored_weights(), converted to fp32.
void read_initial_weights(const formats::WeightPlace& place, formats::WeightReader& reader,
                          const model::TensorSpec& tensor, Elems first, std::span<float> out);

/// Lists what a reader of both functions should read ahead, in the order in which the fill reads
/// it: first the maps of a block whose norms are needed if it `makes_magnitudes` (DoRA), then the
/// weights, then their masters for training in the type `masters_of`.
std::vector<formats::ReadAhead::Source> reading_order(const formats::WeightFiles& files,
                                                      const model::Architecture& model,
                                                      std::optional<DType> masters_of,
                                                      bool makes_magnitudes = false);

/// Starts `engine` with model.weights (WeightFiles) and the adapters of ballast.adapters.path.
/// Missing tensors are drawn from the seed. Calls `reading`, one call at a time, with the bytes
/// read and the total. Throws like engine::Engine::start() and read_initial_weights().
void start_from_weights(engine::Engine& engine, const config::Config& config,
                        const std::function<void(Bytes done, Bytes total)>& reading);

/// Returns the index of the first element of `bytes` that is infinite or NaN; empty if all are
/// finite. `type`: f32, bf16 or f16. Faster than memory if all values are finite.
std::optional<Elems> first_not_finite(ConstHostBytes bytes, DType type);

/// Explains why training cannot begin with element `index` of `bytes`, which is not finite: "tensor
/// 'lm_head.weight' has NaN at element 7, ...". `first`: index in the tensor of the first element
/// of `bytes`.
std::string explain_not_finite(const std::string& tensor, ConstHostBytes bytes, DType type,
                               Elems index, Elems first);

}  // namespace ballast::train
