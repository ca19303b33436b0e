#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/core/dtype.h"
#include "ballast/model/architecture.h"
#include "ballast/model/step_program.h"

#include "tests/support/recording_compute.h"

namespace ballast::model_net {

/// A small model of the fixtures.
struct SmallModel {
  std::string name;     ///< name of its file in tests/data
  std::string section;  ///< content of its model section, as in test::tiny_config()
  /// Changes that give it sequences of 80 tokens, or fewer if the family allows no more.
  std::vector<std::string> longer = {};
  /// Changes that also give it an even number of heads of keys, as ranks and tiles need it.
  std::vector<std::string> shared = {};
};
/// The models of all fixtures of families, and one of GPT-2, by name.
const std::vector<SmallModel>& small_models();

/// A config and the model that it trains.
struct ConfiguredModel {
  config::Config config;
  model::Architecture model;
};
/// Returns a small model whose config has these changes, or nothing if the rules of the family or
/// of its layers forbid them. With `shares_heads`, it has the changes SmallModel::shared.
std::optional<ConfiguredModel> configure(const SmallModel& model,
                                         const std::vector<std::string>& overrides = {},
                                         bool shares_heads = false, std::uint64_t ranks = 1);

/// The models of the config files that come with Ballast, with few layers, by name of the file.
/// Configs that read the model from a folder are left out.
std::vector<std::pair<std::string, model::Architecture>> example_models();

/// One combination of what the calls of a model's passes depend on.
struct Variation {
  std::string_view name;
  std::string_view training = "all";  ///< the trained tensors, see overrides_of()
  std::string_view ranks = "one";     ///< how ranks share the model, see overrides_of()
  bool cuts = false;                  ///< MLPs and experts compute few rows at a time
  bool joins = false;                 ///< one product computes gate and up
  bool tiles = false;                 ///< layers and vocabulary in two tiles
  bool bf16 = false;
  bool packed = false;  ///< several documents per sequence
  bool later = false;   ///< not the first micro-batch of a step
  bool wide = false;    ///< a vocabulary so wide that RecordingOps sums over it in parts
};
const std::vector<Variation>& variations();

/// A model as one rank computes it, and the shape of its passes.
struct RecordedModel {
  std::string name;  ///< "llama/lora"
  model::Architecture whole;
  model::Architecture own;  ///< `whole` as the tensor place computes it
  DType type = DType::f32;
  model::StepShape shape;
  test::RecordedMlp mlp;
  bool later = false;
};
/// All small models in all variations that their families support.
const std::vector<RecordedModel>& recorded_models();

}  // namespace ballast::model_net
