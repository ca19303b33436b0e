#include "ballast/config/stored_model.h"

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

#include "src/config/config_tree.h"

namespace ballast::config {

namespace {

namespace fs = std::filesystem;
using text::Json;

constexpr const char* kIndexSuffix = ".index.json";
constexpr std::string_view kNf4 = ".quant_state.bitsandbytes__nf4";
/// Parts of the names of a text model's tensors in a model of text and images.
constexpr std::string_view kOfLanguage = "language_model.";
constexpr std::string_view kOfText = "text_model.";
/// Suffixes that the formats give to the names of codes, scales and descriptions: bitsandbytes,
/// MXFP4, GPTQ and AWQ, fp8 and compressed-tensors, HQQ.
constexpr std::string_view kOfCodes =
    ".absmax .quant_map .quant_state.bitsandbytes__nf4 .quant_state.bitsandbytes__fp4 .SCB _blocks "
    ".qweight .qzeros .weight_packed .weight_scale .weight_scale_inv .weight_zero_point .codes "
    ".W_q";

/// The index, or the header of a safetensors file; nothing if it is too long.
std::optional<std::string> read_description(const fs::path& path) {
  const auto file = text::open_file(path, O_RDONLY | O_NONBLOCK, ErrorCategory::data);
  const Bytes size = text::regular_file_size(file, path, ErrorCategory::data);
  if (!path.native().ends_with(kIndexSuffix)) return read_header_text(file, path, size).json;
  if (size > kLongestHeader) return {};
  std::string content(size, '\0');
  text::read_fully(file, path, 0, std::as_writable_bytes(std::span(content)));
  return content;
}

}  // namespace

HeaderText read_header_text(const Descriptor& file, const fs::path& path, Bytes size) {
  HeaderText header;
  text::read_fully(file, path, 0, std::as_writable_bytes(std::span(&header.length, 1)));
  if (header.length > kLongestHeader || header.length > size - kLengthBytes) return header;
  header.json.emplace(header.length, '\0');
  text::read_fully(file, path, kLengthBytes, std::as_writable_bytes(std::span(*header.json)));
  return header;
}

std::string name_in_text_model(const std::string& name) {
  constexpr std::string_view kModel = "model.";
  for (const std::string_view wrapper : {kOfLanguage, kOfText}) {
    std::string_view rest = name;
    if (rest.starts_with(kModel)) rest.remove_prefix(kModel.size());
    if (!rest.starts_with(wrapper)) continue;
    const bool inside = rest.size() < name.size();  // "model.language_model."
    rest.remove_prefix(wrapper.size());
    if (inside) return std::string(kModel) + std::string(rest);
    // "language_model." contains the whole class, with its head.
    if (rest.starts_with(kModel) || rest.starts_with("lm_head.")) return std::string(rest);
  }
  return name;
}

std::optional<std::set<std::string>> stored_names(const fs::path& weights) {
  std::error_code ignored;
  fs::path path = weights;
  if (fs::is_directory(path, ignored)) {
    path = weights / "model.safetensors";
    if (!fs::exists(path, ignored)) path += kIndexSuffix;
  }
  if (!fs::exists(path, ignored)) return {};
  try {
    const auto description = read_description(path);
    if (!description) return {};
    const Json json = text::parse_json(*description, path.string());
    const Json* const map = json.find("weight_map");
    std::set<std::string> names;
    for (const auto& [name, value, at] : (map == nullptr ? json : *map).members()) {
      names.insert(name_in_text_model(name));
    }
    return names;
  } catch (const Error&) {
    return {};
  }
}

bool are_quantized(const std::set<std::string>& names) {
  const auto ends = text::words_of(kOfCodes);
  return std::any_of(names.begin(), names.end(), [&ends](const std::string& name) {
    return std::any_of(ends.begin(), ends.end(),
                       [&](std::string_view end) { return name.ends_with(end); });
  });
}

bool is_nf4(const std::set<std::string>& names, const std::string& name) {
  return names.contains(name + std::string(kNf4)) ||
         names.contains(name.substr(name.find('.') + 1) + std::string(kNf4));
}

namespace {

namespace fs = std::filesystem;

constexpr const char* kModelType = "model_type";
constexpr const char* kText = "text_config";
constexpr const char* kTied = "tie_word_embeddings";
constexpr const char* kQuantized = "quantization_config";

/// Keys of folders with images that concern these.
constexpr std::string_view kOfImages =
    "image_token_id video_token_id vision_config vision_end_token_id vision_start_token_id "
    "vision_token_id";

void fill_in_standards(Json& json, std::string_view type) {
  for (const model::TextModelStandard& standard : model::standards_of_text_models()) {
    if (!text::has_word(standard.types, type) || json.find(standard.key) != nullptr) continue;
    const bool whole = standard.value >= 1.0;
    json.add(standard.key,
             whole ? Json(static_cast<std::uint64_t>(standard.value)) : Json(standard.value));
  }
}

void drop_axes(Json& json) {
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    Json* const rope = json.find(key);
    if (rope == nullptr || !rope->is_object()) continue;
    rope->erase("mrope_section");
    rope->erase("mrope_interleaved");
    for (const char* type : {"type", "rope_type"}) {
      Json* const named = rope->find(type);
      if (named != nullptr && *named == "mrope") *named = Json("default");
    }
  }
}

/// Whether the embeddings are tied. Folders that do not say it have no output matrix if they are.
void fill_in_tying(Json& json, const Json& whole, const fs::path& file) {
  const Json* const given = find_given(whole, kTied);
  if (given != nullptr) {
    json[kTied] = Json(*given);
  } else if (find_given(json, kTied) == nullptr) {
    const auto names = stored_names(file.parent_path());
    if (names) json[kTied] = Json(!names->contains("lm_head.weight"));
  }
}

Json without_images(Json json) {
  for (const std::string_view key : text::words_of(kOfImages)) json.erase(key);
  return json;
}

}  // namespace

std::optional<TextPart> find_text_part(const Json& json, const fs::path& file) {
  const Json* const type = find_given(json, kModelType);
  if (type == nullptr || !type->is_string() ||
      !text::has_word(model::text_wrappers().all, type->text()))
    return {};
  const Json* const nested = find_given(json, kText);
  const bool flat = nested == nullptr && text::has_word(model::text_wrappers().flat, type->text());
  if (!flat && (nested == nullptr || !nested->is_object())) return {};
  TextPart part = {flat ? without_images(json) : *nested, file.string(),
                   text::has_word(model::text_wrappers().with_text_model, type->text())
                       ? "model.text_model."
                       : "model.language_model."};
  if (flat) {
    part.json[kModelType] = Json(type->text() + "_text");
  } else {
    part.label += fmt::format(", {}", kText);
  }
  const Json* const own = find_given(part.json, kModelType);
  if (own == nullptr || !own->is_string()) {
    throw Error(
        ErrorCategory::config,
        fmt::format("{}: has no {}, so the family is unknown; add it", part.label, kModelType));
  }
  const std::string given = own->text();
  fill_in_standards(part.json, given);
  if (const std::string_view equal = model::equal_text_model(given); !equal.empty()) {
    drop_axes(part.json);
    part.json[kModelType] = Json(equal);
  }
  fill_in_tying(part.json, json, file);
  const Json* const quantized = json.find(kQuantized);
  if (!flat && quantized != nullptr) part.json[kQuantized] = Json(*quantized);
  return part;
}

std::string wrapper_types() {
  std::vector<std::string> types;
  for (const std::string_view type : text::words_of(model::text_wrappers().all))
    types.emplace_back(type);
  return listed(types);
}

namespace {

/// Keys that do not change the logits: those of the tokenizer, of generation, of transformers
/// itself and of programs that convert models.
constexpr std::string_view kWithoutEffect =
    "_attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash "
    "_experts_implementation _experts_implementation_internal _name_or_path architectures "
    "assistant_confidence_threshold assistant_lookbehind attn_implementation auto_map "
    "bad_words_ids begin_suppress_tokens bos_token_id cache_implementation "
    "chunk_size_feed_forward classifier_dropout cls_token_id custom_pipelines "
    "decoder_start_token_id diversity_penalty do_sample dtype early_stopping "
    "encoder_no_repeat_ngram_size encoder_repetition_penalty eos_token_id epsilon_cutoff "
    "eta_cutoff experts_implementation exponential_decay_length_penalty finetuning_task "
    "forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label "
    "initial_context_length initializer_range is_decoder keys_to_ignore_at_inference label2id "
    "length_penalty mask_token_id max_length max_new_tokens max_position_embeddings min_length "
    "min_new_tokens min_p model_max_length mtp_num_hidden_layers n_ctx name_or_path "
    "no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups "
    "num_beams num_labels num_nextn_predict_layers num_return_sequences output_attentions "
    "output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type "
    "quantization_config._load_in_4bit quantization_config._load_in_8bit "
    "quantization_config.activation_scheme quantization_config.bnb_4bit_compute_dtype "
    "quantization_config.bnb_4bit_quant_storage quantization_config.bnb_4bit_quant_type "
    "quantization_config.bnb_4bit_use_double_quant quantization_config.dequantize "
    "quantization_config.fmt quantization_config.llm_int8_enable_fp32_cpu_offload "
    "quantization_config.llm_int8_has_fp16_weight quantization_config.llm_int8_skip_modules "
    "quantization_config.llm_int8_threshold quantization_config.load_in_4bit "
    "quantization_config.load_in_8bit quantization_config.modules_to_not_convert "
    "quantization_config.quant_method quantization_config.scale_fmt "
    "quantization_config.weight_block_size remove_invalid_values reorder_and_upcast_attn "
    "repetition_penalty return_dict return_dict_in_generate sep_token_id summary_activation "
    "summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens "
    "target_lookbehind task_specific_params temperature tf_legacy_loss tokenizer_class top_k "
    "top_p torch_dtype torchscript transformers.js_config transformers_version typical_p "
    "unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache";
/// Keys of all families that may have only one value, since others change the model. Null means
/// false.
constexpr std::array kMustBeFalse = {"add_cross_attention", "is_encoder_decoder",
                                     "tie_encoder_decoder"};
constexpr const char* kMustBeTrue = "is_causal";
constexpr std::array kDropout = {
    "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop",  "embd_pdrop",
    "hidden_dropout",    "hidden_dropout_prob",          "resid_pdrop", "residual_dropout"};

template <class List>
bool is_among(const List& list, std::string_view name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

bool is_empty(const Json& value) {
  return (value.is_object() && value.members().empty()) ||
         (value.is_array() && value.elements().empty());
}

/// Sorts the keys of one config.json.
class UnknownKeys {
 public:
  UnknownKeys(const model::Family& family, const std::string& file, std::vector<std::string>& notes)
      : class_(family.checkpoint_class()),
        keys_(family.checkpoint_keys()),
        rules_(family.checkpoint_rules()),
        read_(model::read_attributes(family.checkpoint_type())),
        file_(file),
        notes_(notes) {}

  void add(const Json& config) {
    for (const auto& [member, value, at] : config.members()) {
      if (member == kQuantization && value.is_object()) {
        add_quantization(value);
      } else {
        add_one(member, value);
      }
    }
  }
  /// Notes the keys without effect and refuses the others.
  void finish() const {
    if (!off_.empty()) {
      notes_.push_back(fmt::format("model.path: transformers' {} does not use these keys of {}: {}",
                                   class_, file_, fmt::join(off_, ", ")));
    }
    if (unknown_.empty()) return;
    const bool one = unknown_.size() == 1;
    throw Error(
        ErrorCategory::config,
        fmt::format(
            "{}: {}, but Ballast does not know {}, which may change what the model computes; if "
            "{}, remove {}, or give the sizes of the model and model.weights instead of model.path",
            file_, fmt::join(unknown_, ", "), one ? "this key" : "these keys",
            one ? "it does not" : "they do not", one ? "it" : "them"));
  }

 private:
  void add_one(const std::string& name, const Json& value) {
    const auto some = [this](const auto& holds) {
      return std::any_of(keys_.begin(), keys_.end(), holds);
    };
    if (is_empty(value) || some([&](const auto& key) { return key.name == name; })) return;
    // The name, or that of an object with the name as a member.
    const auto is_other_name = [&name](const auto& other) {
      return other.first == name || other.first.starts_with(name + ".");
    };
    if (std::ranges::any_of(rules_.aliases, is_other_name) ||
        std::ranges::any_of(rules_.fallbacks, is_other_name)) {
      return;
    }
    const bool known =
        text::has_word(kWithoutEffect, name) || is_among(rules_.without_effect, name);
    if (known || is_among(kMustBeFalse, name) || name == kMustBeTrue) return check(name, value);
    if (is_among(kDropout, name)) return add_dropout(name, value);
    if (name == kQuantization && value.is_null()) return;
    add_unknown(name, value, read_);
  }
  void add_quantization(const Json& object) {
    const Json* const method = object.find("quant_method");
    const auto read = model::read_attributes(method == nullptr ? "" : method->text());
    for (const auto& [member, value, at] : object.members()) {
      const std::string name = fmt::format("{}.{}", kQuantization, member);
      const bool usual = member == "expert_dtype" && value == "fp8";
      if (usual || is_empty(value) || text::has_word(kWithoutEffect, name)) continue;
      add_unknown(name, value, read, member);
    }
  }
  /// Adds a key that Ballast does not know. Only those that the class reads (`read`) can change
  /// what it computes. Names that begin with "_" are comments and private notes of programs.
  void add_unknown(const std::string& name, const Json& value, std::optional<std::string_view> read,
                   std::string_view member = {}) {
    if (member.empty()) member = name;
    const std::string shown = text::printable(name);
    const bool is_off = value.is_null() || (value.is_boolean() && !value.flag());
    const bool is_used = read ? text::has_word(*read, member) && !value.is_null() : !is_off;
    if (is_used) {
      constexpr std::size_t kShown = 60;
      unknown_.push_back(fmt::format("{} is {}", shown, text::printable(value.compact(), kShown)));
    } else if (!member.starts_with('_')) {
      off_.push_back(shown);
    }
  }
  void check(const std::string& name, const Json& value) const {
    const bool must_be_true = name == kMustBeTrue;
    if (!must_be_true && (value.is_null() || !is_among(kMustBeFalse, name))) return;
    const char* const needed = must_be_true ? "true" : "false";
    if (value.is_boolean() && value.text() == needed) return;
    throw Error(
        ErrorCategory::config,
        fmt::format("{}: {} is {}, but Ballast supports only {}; give the weights of another model",
                    file_, name, text::printable(value.compact()), needed));
  }
  void add_dropout(const std::string& name, const Json& value) const {
    if (value.is_null() || (value.is_number() && value.number() == 0.0)) return;
    notes_.push_back(fmt::format("model.path: {} is {} in {}, but Ballast trains without dropout",
                                 name, text::printable(value.compact()), file_));
  }

  std::string_view class_;
  std::vector<model::CheckpointKey> keys_;
  model::CheckpointRules rules_;
  std::optional<std::string_view> read_;  ///< nothing: the class is not one of transformers
  const std::string& file_;
  std::vector<std::string>& notes_;
  std::vector<std::string> off_;
  std::vector<std::string> unknown_;
};

}  // namespace

void check_unknown_keys(const Json& json, const model::Family& family, const std::string& file,
                        std::vector<std::string>& notes) {
  UnknownKeys unknown(family, file, notes);
  unknown.add(json);
  unknown.finish();
}

}  // namespace ballast::config
