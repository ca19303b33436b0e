#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/formats/safetensors.h"
#include "ballast/formats/weight_files.h"

// Tensors of a folder that the text model does not use. They pass through a run: the folder that it
// writes has their bytes.

namespace ballast::formats {

/// Parts of a model of which the tensors pass through.
enum class PassingPart : std::uint8_t {
  mtp,        ///< layers for multi-token prediction (DeepSeek, arXiv:2412.19437, section 2.2)
  vision,     ///< encoders of images and videos
  audio,      ///< encoders of audio
  projector,  ///< maps from these encoders to the text model
  indexer,    ///< the choice of tokens for sparse attention (DeepSeek, "DeepSeek-V3.2", 2025)
  /// maps and norms of keys and values in layers that attend to those of other layers (Gemma 4)
  unread_keys,
  activation_scales  ///< scales of the inputs of matrices in FP8, for computing in FP8
};

/// Returns "MTP layers", "vision", "audio", "projector", "indexers", "unread keys and values" or
/// "scales of activations".
std::string_view to_string(PassingPart part);

/// The part that tensor `name` of the files belongs to; nothing if it belongs to the text model, or
/// to nothing that is known. A layer is one for multi-token prediction if it has an eh_proj. Which
/// layers do not read their own keys follows from num_kv_shared_layers in the folder's config.json.
std::optional<PassingPart> passing_part(const WeightFiles& files, const std::string& name);

struct TensorTotals {
  std::size_t tensors = 0;
  Elems elements = 0;
  Bytes bytes = 0;

  void add(const WeightPlace& place);
};

/// Size of the tensors that pass through, by part.
std::map<PassingPart, TensorTotals> passing_totals(const WeightFiles& files);

/// Describes the parts: "vision 87 tensors, 412 M parameters, 824 MiB"; "" if there are none.
std::string describe(const std::map<PassingPart, TensorTotals>& totals);

/// The tensors that pass through, in file order.
std::vector<const WeightPlace*> passing_tensors(const WeightFiles& files);

}  // namespace ballast::formats
