#pragma once

#include <filesystem>
#include <functional>
#include <span>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/config/config.h"
#include "ballast/engine/engine.h"
#include "ballast/formats/model_folder.h"

namespace ballast::train {

/// Called with the bytes that are done and the total.
using Progress = std::function<void(Bytes done, Bytes total)>;

/// Throws Error(io) if the disk of the run directory lacks room for the weights of `config`.
void check_room_for_weights(const config::Config& config, const model::Architecture& model);

/// Returns the tensors of a model in files, as F32. Tensors that are spread over several blocks are
/// whole.
std::vector<formats::TensorToStore> tensors_of(const model::Architecture& model);
/// Writes the `values` of a block (flat) to their places in the model's tensors.
void write_block(formats::ModelFolderWriter& writer, const model::BlockSpec& block,
                 std::span<const float> values);

/// Returns whether the run directory has weights. Collective; rank 0 decides.
bool has_saved_weights(const config::Config& config, comm::Ranks* ranks);

/// Writes the master weights of `engine` as F32 to the run directory: a Hugging Face folder with
/// the config.json, generation_config.json and tokenizer of the imported model, the bytes of its
/// tensors that do not change (ImportedFiles) and its layout, or a config.json made from `config`;
/// for a model with adapters, a PEFT folder. Keeps one block in memory at a time. Collective over
/// the ranks; the `first` one writes. Throws Error(io).
void save_weights(engine::Engine& engine, const config::Config& config, bool first,
                  const Progress& progress);

}  // namespace ballast::train
