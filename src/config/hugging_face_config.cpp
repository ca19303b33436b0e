#include "ballast/config/hugging_face_config.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <system_error>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>

#include "ballast/config/adapter_folder.h"
#include "ballast/config/stored_model.h"
#include "ballast/core/error.h"
#include "ballast/model/block_layout.h"
#include "ballast/model/family.h"
#include "ballast/text/files.h"

#include "src/config/config_tree.h"

namespace ballast::config {
namespace {

namespace fs = std::filesystem;
using text::Json;

/// Describes the storage of the weights, and which kinds of storage WeightFiles reads.
constexpr const char* kBitsandbytes = "bitsandbytes";
/// Sizes of the model, for which transformers' defaults are never intended.
constexpr std::array kNeeded = {"vocab_size", "hidden_size", "num_layers", "num_heads"};

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
      fmt::format("{}: {} is {}, but Ballast supports only {}; give the weights of another model",
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

/// Converts the value of the key of the model section to the form of config.json.
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
    if (found == nullptr) continue;
    const model::Family& family = model::family(name);
    if (*found == family.checkpoint_type()) return name;
    if (lists(family.checkpoint_rules().other_types, found->text())) return name;
  }
  constexpr const char* kType = "model_type";
  const Json* const type = find_given(json, kType);
  if (type == nullptr) refuse(fmt::format("{}: has no {}, so the family is unknown", file, kType));
  if (json.find("text_config") != nullptr) {
    refuse(fmt::format(
        "{}: {} is {}, a model of several parts, of which Ballast trains the text model "
        "of {}; give one of these, or a folder of the text model alone",
        file, kType, shown(*type), wrapper_types()));
  }
  refuse_unsupported(file, kType, *type, checkpoint_types());
}

/// Member `key` of the object; null if it has none.
Json member_of(const Json& object, const char* key) {
  const Json* const found = object.find(key);
  return found == nullptr ? Json() : *found;
}

/// Whether the quantization_config of `file` was left over by a program that has dequantised the
/// weights. The names of the tensors in the same folder decide.
bool is_leftover(const fs::path& folder, const std::string& file, std::vector<std::string>& notes) {
  const auto names = stored_names(folder);
  if (!names || are_quantized(*names)) return false;
  notes.push_back(
      fmt::format("model.path: {} is a leftover in {}: the weights are not quantised, so they are "
                  "used as they are",
                  kQuantization, file));
  return true;
}

/// Refuses FP8 in blocks other than 128 x 128. Without blocks, the shapes of the stored scales show
/// whether they are for rows or for matrices.
void check_blocks(const Json& object, const std::string& file) {
  constexpr const char* kSize = "weight_block_size";
  const Json size = member_of(object, kSize);
  if (size.is_null() || size.compact() == "[128,128]") return;
  refuse(fmt::format(
      "{}: {}.{} is {}, but Ballast reads FP8 only in blocks of [128,128] or, with null, "
      "with a scale for each row or matrix; give the folder of the original model, or load this "
      "one with transformers, dequantize() it and save it",
      file, kQuantization, kSize, shown(size)));
}

/// Refuses weights that WeightFiles cannot dequantise.
void check_quantization(const Json& object, const std::string& file) {
  const Json method = member_of(object, "quant_method");
  const std::vector<std::string> methods = {"mxfp4", kBitsandbytes, "fp8"};
  if (method.is_string() && !lists(methods, method.text())) {
    refuse(
        fmt::format("{}: {}.quant_method is {}, but Ballast reads only {}; give the folder of the "
                    "original model, or load this one with transformers, dequantize() it and save "
                    "it",
                    file, kQuantization, shown(method), listed(methods)));
  }
  const auto check = [&](const char* key, const std::vector<std::string>& known) {
    const Json found = member_of(object, key);
    if (found.is_string() && lists(known, found.text())) return;
    refuse_unsupported(file, fmt::format("{}.{}", kQuantization, key), found, known);
  };
  check("quant_method", methods);
  if (method == "fp8") check_blocks(object, file);
  if (member_of(object, "load_in_4bit").flag()) check("bnb_4bit_quant_type", {"nf4"});
}

/// Removes key `name`, or member b of object a for "a.b", and returns its value; null if the file
/// has none.
Json take(Json& json, const std::string& name) {
  const std::size_t dot = name.find('.');
  if (dot != std::string::npos) {
    Json* const object = json.find(name.substr(0, dot));
    return object == nullptr ? Json() : take(*object, name.substr(dot + 1));
  }
  const Json* const found = json.find(name);
  if (found == nullptr) return {};
  Json value = *found;
  json.erase(name);
  return value;
}

/// Replaces other names of keys and of the family.
Json with_aliases(Json json, const model::Family& family) {
  const model::CheckpointRules rules = family.checkpoint_rules();
  if (const Json* const type = find_given(json, "model_type");
      type != nullptr && lists(rules.other_types, type->text())) {
    json["model_type"] = Json(std::string(family.checkpoint_type()));
  }
  for (const auto& [alias, key] : rules.aliases) {
    const bool nested = alias.find('.') != std::string::npos;
    if (!nested && json.find(alias) == nullptr) continue;
    Json value = take(json, alias);
    if (!nested || !value.is_null()) json[key] = std::move(value);
  }
  for (const auto& [name, key] : rules.fallbacks) {
    Json value = take(json, name);
    if (!value.is_null() && find_given(json, key) == nullptr) json[key] = std::move(value);
  }
  for (const auto* const names : {&rules.aliases, &rules.fallbacks}) {
    for (const auto& [name, key] : *names) {
      if (const std::size_t dot = name.find('.'); dot != std::string::npos)
        json.erase(name.substr(0, dot));
    }
  }
  return json;
}

/// Member `layer` of per_layer_config, whose keys are numbers with or without leading zeros; null
/// if there is none.
Json overrides_of(const Json& overrides, std::size_t layer) {
  for (const auto& [key, value, at] : overrides.members()) {
    std::size_t number = 0;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), number);
    if (error == std::errc() && end == key.data() + key.size() && number == layer) return value;
  }
  return {};
}

/// Replaces per_layer_config by the keys for all layers without a window.
Json with_full_layers(Json json, const model::CheckpointRules& rules, const std::string& file) {
  constexpr const char* kPerLayer = "per_layer_config";
  const Json* const given = find_given(json, kPerLayer);
  if (rules.of_full_layers.empty() || given == nullptr) return json;
  const Json overrides = *given;
  const Json types = member_of(json, "layer_types");
  const auto fail = [&](const std::string& rule) {
    refuse(fmt::format("{}: {} is {}, but {}; give the weights of another model", file, kPerLayer,
                       shown(overrides), rule));
  };
  if (!overrides.is_object() || types.elements().empty()) {
    fail("Ballast needs an object, and layer_types as a list");
  }
  const std::size_t layers = types.elements().size();
  const Json of_full = overrides_of(overrides, layers - 1);
  for (std::size_t i = 0; i < layers; ++i) {
    const Json own = overrides_of(overrides, i);
    const bool full = i + 1 == layers || types.elements()[i] != "sliding_attention";
    if (full ? !are_equal(own, of_full) : !own.members().empty()) {
      fail(
          fmt::format("Ballast supports only equal values for all layers without a window and none "
                      "for the others, unlike layer {}",
                      i));
    }
  }
  std::size_t known = 0;
  for (const auto& [member, key] : rules.of_full_layers) {
    const Json* const value = of_full.find(member);
    known += value == nullptr ? 0 : 1;
    json[key] = value == nullptr ? member_of(json, member.c_str()) : Json(*value);
  }
  if (known != of_full.members().size()) fail("Ballast does not read all of its members");
  json.erase(kPerLayer);
  return json;
}

/// Refuses windows of single layers without a size: transformers refuses them, or its attentions
/// differ in them.
void check_windows(const Json& json, const std::vector<model::CheckpointKey>& keys,
                   const std::string& file) {
  constexpr const char* kUsed = "use_sliding_window";
  const Json* const types = find_given(json, "layer_types");
  const auto has = [&keys](const char* name) {
    return std::any_of(keys.begin(), keys.end(),
                       [&](const model::CheckpointKey& key) { return key.name == name; });
  };
  if (types == nullptr || !has("layer_types") || !has(kUsed)) return;
  const auto& layers = types->elements();
  const bool slides = std::any_of(layers.begin(), layers.end(),
                                  [](const Json& type) { return type == "sliding_attention"; });
  const Json* const used = find_given(json, kUsed);
  if (!slides || (used != nullptr && used->flag())) return;
  refuse(
      fmt::format("{}: layer_types has sliding_attention, but {} is false; set it to true, or make "
                  "these layers full_attention",
                  file, kUsed));
}

bool is_plain_rope(const model::CheckpointKey& key, const Json& value) {
  return key.own == "rope_scaling" &&
         (value.is_null() || are_equal(value, Json::object({{"rope_type", "default"}})));
}

/// Counts a negative pad token from the end of the vocabulary, like nn.Embedding, and drops one
/// that no embedding has.
void settle_pad_token(Json& section, const std::string& file, std::vector<std::string>& notes) {
  Json* const found = section.find(model::kPadToken);
  const Json* const size = section.find("vocab_size");
  if (found == nullptr || size == nullptr || !found->is_number() || !size->whole()) return;
  const auto vocabulary = static_cast<double>(*size->whole());
  const double token = found->number();
  if (token != std::floor(token)) return;
  if (token < 0.0 && token >= -vocabulary) {
    *found = Json(static_cast<std::uint64_t>(token + vocabulary));
  } else if (token < 0.0 || token >= vocabulary) {
    notes.push_back(fmt::format("model.path: {} has no token with the {} {}, so it has no effect",
                                file, model::kPadToken, found->compact()));
    *found = Json();
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
  std::string file = path.string();
  Json json = text::parse_json(text::read_settings(path, "model"), file);
  if (auto part = find_text_part(json, path)) {
    json = std::move(part->json);
    file = std::move(part->label);
  }
  const std::string name = find_family(json, file);
  const model::Family& family = model::family(name);
  const model::CheckpointRules rules = family.checkpoint_rules();
  const auto keys = family.checkpoint_keys();
  check_windows(json, keys, file);
  if (const Json* const stored = find_given(json, kQuantization);
      stored != nullptr && stored->is_object() && !stored->members().empty()) {
    if (is_leftover(folder, file, notes)) {
      json.erase(kQuantization);
    } else {
      check_quantization(*stored, file);
    }
  }
  json = with_full_layers(with_aliases(std::move(json), family), rules, file);
  json = with_rope_keys(std::move(json), family, file, notes);
  Json section = Json::object();
  for (const model::CheckpointKey& key : keys) {
    const Json* const theirs = json.find(key.name);
    const bool is_null = theirs != nullptr && theirs->is_null();
    if (key.own.empty()) {
      if (theirs != nullptr && !is_null) check_supported(file, key, *theirs);
      if (theirs == nullptr && !key.standard.is_null()) check_supported(file, key, key.standard);
    } else if (key.own == "family") {
      section.add(key.own, name);
    } else if (lists(kNeeded, key.own) && (theirs == nullptr || is_null)) {
      refuse(fmt::format("{}: has no {}; add it", file, key.name));
    } else if (key.own == "intermediate_size" && theirs != nullptr && theirs->text() == "0") {
      // In a section 0 means the default.
      refuse(fmt::format("{}: {} is 0, but an MLP has a width of at least 1; give another model",
                         file, key.name));
    } else if (is_null && !key.nullable) {
      refuse(fmt::format(
          "{}: {} is null, but transformers' {} needs a value; give one or remove the key", file,
          key.name, family.checkpoint_class()));
    } else if (!is_null && !(theirs == nullptr && key.standard.is_null())) {
      section.add(key.own, theirs == nullptr ? key.standard : *theirs);
    }
  }
  check_unknown_keys(json, family, file, notes);
  settle_pad_token(section, file, notes);
  return section;
}

void compare_with_checkpoint(const fs::path& path, const Config& config) {
  const auto keys = model::family(config.model.family).checkpoint_keys();
  std::error_code ignored;
  if (keys.empty() || !fs::exists(path, ignored)) return;
  std::string name = path.string();
  // The file may be a config of Ballast, which has comments and none of these keys.
  Json file = text::parse_json(text::read_settings(path, "config"), name,
                               {.comments = true, .non_finite = true});
  if (auto part = find_text_part(file, path)) {
    file = std::move(part->json);
    name = std::move(part->label);
  }
  const model::Family& family = model::family(config.model.family);
  std::vector<std::string> notes;
  file = with_full_layers(with_aliases(std::move(file), family), family.checkpoint_rules(), name);
  const bool has_rope = has_rope_keys(file);
  if (has_rope) file = with_rope_keys(std::move(file), family, name, notes);
  const Json section = with_separate_rope_keys(effective_section(config));
  for (const model::CheckpointKey& key : keys) {
    if (key.own == model::kPadToken) continue;  // the model computes the same
    const Json* const theirs =
        has_rope && key.own == "rope_scaling" ? file.find(key.name) : find_given(file, key.name);
    if (theirs == nullptr) continue;
    if (key.own.empty()) {
      check_supported(name, key, *theirs);
      continue;
    }
    const Json ours = as_in_checkpoint(key, own_value(section, key));
    if (are_equal(*theirs, ours)) continue;
    // Null also means plain positions.
    if (is_plain_rope(key, *theirs) && is_plain_rope(key, ours)) continue;
    const auto types = checkpoint_types();
    if (key.own == "family" && !lists(types, theirs->text())) {
      refuse_unsupported(name, key.name, *theirs, types);
    }
    refuse(
        fmt::format("{}: {} is {}, but model.{} is {}; set model.{} to {}, or give other weights",
                    name, key.name, shown(*theirs), key.own, shown(ours), key.own, shown(*theirs)));
  }
}

Json text_model_of(const Json& json, const fs::path& file) {
  auto part = find_text_part(json, file);
  return part ? std::move(part->json) : json;
}

std::string module_prefix(const Json& json, const fs::path& file) {
  const auto part = find_text_part(json, file);
  return part ? part->prefix : kModulePrefix;
}

std::string of_decoded_weights(const std::string& text) {
  Json json = text::parse_json(text, kCheckpointConfig,
                               {.category = ErrorCategory::data, .comments = true});
  if (json.find(kQuantization) == nullptr) return text;
  json.erase(kQuantization);
  return json.pretty() + "\n";
}

std::string with_quantization(const std::string& text, Json quantization,
                              const std::vector<std::string>& modules) {
  if (quantization.is_null()) return of_decoded_weights(text);
  // transformers' name of the list, and the name that some programs write.
  const char* const key =
      quantization.find("ignored_layers") != nullptr ? "ignored_layers" : "modules_to_not_convert";
  if (!modules.empty() && !member_of(quantization, key).is_array())
    quantization[key] = Json::array();
  std::unordered_set<std::string> known;
  const Json list = member_of(quantization, key);
  for (const Json& name : list.elements()) known.insert(name.text());
  for (const std::string& module : modules) {
    if (known.insert(module).second) quantization[key].push_back(module);
  }
  Json json = text::parse_json(text, kCheckpointConfig,
                               {.category = ErrorCategory::data, .comments = true});
  const Json* const stored = json.find(kQuantization);
  if (stored != nullptr && stored->compact() == quantization.compact()) return text;
  json[kQuantization] = std::move(quantization);
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
      // A missing key would have the class's default.
      if (!ours.is_null() || !key.standard.is_null()) set(key.name, ours);
    } else if (!key.supported.empty()) {
      const std::string& value = key.supported.front();
      set(key.name, text::is_json(value) ? text::parse_json(value, key.name) : Json(value));
    }
  }
  if (!has_length) out["max_position_embeddings"] = config.model.max_sequence;
  add_rope_keys(out, model::family(config.model.family));
  out["initializer_range"] = config.model.init_stddev;
  // Without these keys, generation would end at the ids that the family's tokenizer uses.
  out["bos_token_id"] = Json();
  out["eos_token_id"] = Json();
  out["torch_dtype"] = torch_name(config.type);
  return out;
}

}  // namespace ballast::config
