#include "ballast/config/checkpoint_config.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/suggest.h"
#include "ballast/model/family.h"
#include "ballast/text/files.h"

#include "src/config/json_values.h"
#include "src/config/rope_keys.h"

namespace ballast::config {
namespace {

namespace fs = std::filesystem;
using text::Json;

/// Keys that do not change the logits: of the tokenizer, of generation, of transformers itself.
constexpr std::array kWithoutEffect = {"_attn_implementation",
                                       "_name_or_path",
                                       "architectures",
                                       "attn_implementation",
                                       "bad_words_ids",
                                       "begin_suppress_tokens",
                                       "bos_token_id",
                                       "cache_implementation",
                                       "classifier_dropout",
                                       "cls_token_id",
                                       "decoder_start_token_id",
                                       "diversity_penalty",
                                       "do_sample",
                                       "dtype",
                                       "early_stopping",
                                       "encoder_no_repeat_ngram_size",
                                       "eos_token_id",
                                       "exponential_decay_length_penalty",
                                       "finetuning_task",
                                       "forced_bos_token_id",
                                       "forced_eos_token_id",
                                       "gradient_checkpointing",
                                       "id2label",
                                       "initial_context_length",
                                       "initializer_range",
                                       "is_decoder",
                                       "keys_to_ignore_at_inference",
                                       "label2id",
                                       "length_penalty",
                                       "mask_token_id",
                                       "max_length",
                                       "max_position_embeddings",
                                       "min_length",
                                       "model_max_length",
                                       "n_ctx",
                                       "name_or_path",
                                       "no_repeat_ngram_size",
                                       "num_beam_groups",
                                       "num_beams",
                                       "num_labels",
                                       "num_return_sequences",
                                       "output_attentions",
                                       "output_hidden_states",
                                       "output_scores",
                                       "pad_token_id",
                                       "prefix",
                                       "pretraining_tp",
                                       "problem_type",
                                       "quantization_config._load_in_4bit",
                                       "quantization_config._load_in_8bit",
                                       "quantization_config.bnb_4bit_compute_dtype",
                                       "quantization_config.bnb_4bit_quant_storage",
                                       "quantization_config.bnb_4bit_quant_type",
                                       "quantization_config.bnb_4bit_use_double_quant",
                                       "quantization_config.llm_int8_enable_fp32_cpu_offload",
                                       "quantization_config.llm_int8_has_fp16_weight",
                                       "quantization_config.llm_int8_skip_modules",
                                       "quantization_config.llm_int8_threshold",
                                       "quantization_config.load_in_4bit",
                                       "quantization_config.load_in_8bit",
                                       "quantization_config.modules_to_not_convert",
                                       "quantization_config.quant_method",
                                       "remove_invalid_values",
                                       "reorder_and_upcast_attn",
                                       "repetition_penalty",
                                       "return_dict",
                                       "return_dict_in_generate",
                                       "sep_token_id",
                                       "summary_activation",
                                       "summary_first_dropout",
                                       "summary_proj_to_labels",
                                       "summary_type",
                                       "summary_use_proj",
                                       "suppress_tokens",
                                       "task_specific_params",
                                       "temperature",
                                       "tf_legacy_loss",
                                       "tokenizer_class",
                                       "top_k",
                                       "top_p",
                                       "torch_dtype",
                                       "torchscript",
                                       "transformers_version",
                                       "typical_p",
                                       "unsloth_fixed",
                                       "unsloth_version",
                                       "use_bfloat16",
                                       "use_cache"};
/// How the weights are stored, and which ways of it WeightFiles decodes.
constexpr const char* kQuantization = "quantization_config";
constexpr const char* kBitsandbytes = "bitsandbytes";
/// Keys of all families that must be false: each changes the model.
constexpr std::array kMustBeFalse = {"add_cross_attention", "is_encoder_decoder",
                                     "tie_encoder_decoder"};
constexpr std::array kDropout = {
    "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "embd_pdrop",
    "hidden_dropout",    "hidden_dropout_prob",          "resid_pdrop"};
/// Keys whose defaults here are not those of transformers.
constexpr std::array kNeeded = {"vocab_size", "hidden_size", "num_layers", "num_heads",
                                "norm_epsilon"};

template <class List>
bool lists(const List& list, std::string_view name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCategory::config, message);
}

/// The value of the key of the model section that `key` names.
const Json& own_value(const Json& section, const model::CheckpointKey& key) {
  const Json* const found = section.find(key.own);
  expects(found != nullptr, "checkpoint_keys() names a key that the model section lacks");
  return *found;
}

std::string shown(const Json& value) {
  constexpr std::size_t kLongest = 60;
  return text::printable(value.compact(), kLongest);
}

[[noreturn]] void refuse_unsupported(const std::string& file, const std::string& key,
                                     const Json& theirs,
                                     const std::vector<std::string>& supported) {
  refuse(
      fmt::format("{}: {} is {}, but Ballast supports only {}; give the weights of another "
                  "model",
                  file, key, shown(theirs), supported.empty() ? "null" : listed(supported)));
}

void check_supported(const std::string& file, const model::CheckpointKey& key, const Json& theirs) {
  if (!lists(key.supported, theirs.text())) {
    refuse_unsupported(file, key.name, theirs, key.supported);
  }
}

std::vector<std::string> checkpoint_types() {
  std::vector<std::string> types = model::family_names();
  for (std::string& type : types) type = model::family(type).checkpoint_type();
  return types;
}

/// The value of the key of the model section as config.json has it.
Json as_in_checkpoint(const model::CheckpointKey& key, const Json& own) {
  if (key.own != "family") return own;
  return Json(std::string(model::family(own.text()).checkpoint_type()));
}

/// The family that config.json names.
std::string find_family(const Json& json, const std::string& file) {
  const auto families = model::family_names();
  for (const std::string& name : families) {
    const auto keys = model::family(name).checkpoint_keys();
    const Json* const found = keys.empty() ? nullptr : find_given(json, keys.front().name);
    if (found != nullptr && *found == model::family(name).checkpoint_type()) return name;
  }
  constexpr const char* kType = "model_type";
  const Json* const type = find_given(json, kType);
  if (type == nullptr) refuse(fmt::format("{}: has no {}, so the family is unknown", file, kType));
  const std::vector<std::string> types = checkpoint_types();
  if (type->is_string() && lists(types, type->text() + "_text")) {
    refuse(
        fmt::format("{}: {} is {}, a model of text and images; give a folder of its text model, "
                    "whose {} is \"{}_text\"",
                    file, kType, shown(*type), kType, type->text()));
  }
  refuse_unsupported(file, kType, *type, types);
}

bool is_empty(const Json& value) {
  return value.is_null() || (value.is_object() && value.members().empty()) ||
         (value.is_array() && value.elements().empty());
}

/// Its member `key`, null if it has none.
Json member_of(const Json& object, const char* key) {
  const Json* const found = object.find(key);
  return found == nullptr ? Json() : *found;
}

/// Refuses weights that WeightFiles does not decode.
void check_quantization(const Json& object, const std::string& file) {
  const auto check = [&](const char* key, const std::vector<std::string>& known) {
    const Json found = member_of(object, key);
    if (found.is_string() && lists(known, found.text())) return;
    refuse_unsupported(file, fmt::format("{}.{}", kQuantization, key), found, known);
  };
  check("quant_method", {"mxfp4", kBitsandbytes});
  if (member_of(object, "load_in_4bit").flag()) check("bnb_4bit_quant_type", {"nf4"});
}

/// Refuses the members of `object`, whose names start with `prefix`, that are not known.
void check_members(const Json& object, const std::string& prefix,
                   const std::vector<model::CheckpointKey>& keys, const std::string& file,
                   std::vector<std::string>& notes) {
  const auto some = [&keys](const auto& holds) {
    return std::any_of(keys.begin(), keys.end(), holds);
  };
  for (const auto& [member, value, at] : object.members()) {
    const std::string name = prefix + member;
    if (is_empty(value) || some([&](const auto& key) { return key.name == name; })) continue;
    if (value.is_object() &&
        some([&](const auto& key) { return key.name.starts_with(name + "."); })) {
      check_members(value, name + ".", keys, file, notes);
    } else if (name == kQuantization && value.is_object()) {
      check_quantization(value, file);
      check_members(value, name + ".", keys, file, notes);
    } else if (lists(kDropout, name)) {
      if (value.is_number() && value.number() == 0.0) continue;
      notes.push_back(fmt::format("model.path: {} is {} in {}, but Ballast trains without dropout",
                                  name, shown(value), file));
    } else if (lists(kMustBeFalse, name)) {
      check_supported(file, {name, "", {"false"}}, value);
    } else if (!lists(kWithoutEffect, name)) {
      refuse(
          fmt::format("{}: {} is {}, but Ballast does not know this key, which may change what the "
                      "model computes; if it does not, remove it, or give the sizes of the model "
                      "and model.weights instead of model.path",
                      file, text::printable(name), shown(value)));
    }
  }
}

/// The effective model section, null values included.
Json effective_section(const Config& config) {
  const Json whole = text::parse_json(print(config), "the config");
  const Json* const section = whole.find("model");
  expects(section != nullptr, "the config has no model section");
  return *section;
}

}  // namespace

std::string_view torch_name(DType type) {
  switch (type) {
    case DType::f32:
      return "float32";
    case DType::bf16:
      return "bfloat16";
    case DType::f16:
      break;
  }
  return "float16";
}

Json read_model_section(const fs::path& folder, std::vector<std::string>& notes) {
  const fs::path path = folder / kCheckpointConfig;
  const std::string file = path.string();
  const Json json =
      with_rope_keys(text::parse_json(text::read_settings(path, "model"), file), file);
  const std::string family = find_family(json, file);
  const auto keys = model::family(family).checkpoint_keys();
  Json section = Json::object();
  for (const model::CheckpointKey& key : keys) {
    const Json* const theirs = find_given(json, key.name);
    if (theirs == nullptr) {
      if (!lists(kNeeded, key.own) || section.find(key.own) != nullptr) continue;
      refuse(fmt::format("{}: has no {}; add it", file, key.name));
    }
    if (key.own.empty()) {
      check_supported(file, key, *theirs);
    } else if (key.own == "family") {
      section.add(key.own, family);
    } else if (const Json* const known = section.find(key.own); known == nullptr) {
      section.add(key.own, *theirs);
    } else if (!are_equal(*known, *theirs)) {
      refuse(fmt::format("{}: {} is {}, but another key says {}", file, key.name, shown(*theirs),
                         shown(*known)));
    }
  }
  check_members(json, "", keys, file, notes);
  return section;
}

void compare_with_checkpoint(const fs::path& path, const Config& config) {
  const auto keys = model::family(config.model.family).checkpoint_keys();
  std::error_code ignored;
  if (keys.empty() || !fs::exists(path, ignored)) return;
  const std::string name = path.string();
  // It may be a config of Ballast, which has comments and none of these keys.
  const Json file = with_rope_keys(text::parse_json(text::read_settings(path, "config"), name,
                                                    {.comments = true, .non_finite = true}),
                                   name);
  const Json section = effective_section(config);
  for (const model::CheckpointKey& key : keys) {
    const Json* const theirs = find_given(file, key.name);
    if (theirs == nullptr) continue;
    if (key.own.empty()) {
      check_supported(name, key, *theirs);
      continue;
    }
    const Json ours = as_in_checkpoint(key, own_value(section, key));
    if (are_equal(*theirs, ours)) continue;
    const auto types = checkpoint_types();
    if (key.own == "family" && !lists(types, theirs->text())) {
      refuse_unsupported(name, key.name, *theirs, types);
    }
    refuse(
        fmt::format("{}: {} is {}, but model.{} is {}; set model.{} to {}, or give other "
                    "weights",
                    name, key.name, shown(*theirs), key.own, shown(ours), key.own, shown(*theirs)));
  }
}

std::optional<model::Quantization> stored_quantization(const fs::path& weights) {
  std::error_code ignored;
  const bool is_folder = fs::is_directory(weights, ignored);
  const fs::path path = (is_folder ? weights : weights.parent_path()) / kCheckpointConfig;
  if (!fs::exists(path, ignored)) return {};
  const Json file =
      text::parse_json(text::read_settings(path, "model"), path.string(), {.comments = true});
  const Json found = member_of(file, kQuantization);
  if (!(member_of(found, "quant_method") == kBitsandbytes) ||
      !member_of(found, "load_in_4bit").flag()) {
    return {};
  }
  return model::Quantization{.format = model::Quantization::Format::nf4,
                             .double_scales = member_of(found, "bnb_4bit_use_double_quant").flag()};
}

std::string of_decoded_weights(const std::string& text) {
  Json json = text::parse_json(text, kCheckpointConfig,
                               {.category = ErrorCategory::data, .comments = true});
  if (json.find(kQuantization) == nullptr) return text;
  json.erase(kQuantization);
  return json.pretty() + "\n";
}

Json make_checkpoint_config(const Config& config) {
  const Json section = effective_section(config);
  Json out = Json::object();
  const auto set = [&out](const std::string& name, const Json& value) {
    const std::size_t dot = name.find('.');
    Json& place = out[name.substr(0, dot)];
    (dot == std::string::npos ? place : place[name.substr(dot + 1)]) = value;
  };
  if (const auto name = model::family(config.model.family).checkpoint_class(); !name.empty()) {
    out["architectures"].push_back(name);
  }
  bool has_length = false;
  for (const model::CheckpointKey& key : model::family(config.model.family).checkpoint_keys()) {
    has_length = has_length || key.own == "max_sequence";
    if (!key.own.empty()) {
      const Json ours = as_in_checkpoint(key, own_value(section, key));
      if (!ours.is_null()) set(key.name, ours);
    } else if (!key.supported.empty()) {
      const std::string& value = key.supported.front();
      set(key.name, text::is_json(value) ? text::parse_json(value, key.name) : Json(value));
    }
  }
  if (!has_length) out["max_position_embeddings"] = config.model.max_sequence;
  out["initializer_range"] = config.model.init_stddev;
  // Without these, generation would end at the ids that the family's tokenizer uses.
  out["bos_token_id"] = Json();
  out["eos_token_id"] = Json();
  out["torch_dtype"] = torch_name(config.type);
  return out;
}

}  // namespace ballast::config
