#include "src/config/checkpoint_unknown_keys.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/suggest.h"
#include "ballast/text/words.h"

#include "src/config/json_values.h"
#include "src/config/read_attributes.h"

namespace ballast::config {
namespace {

using text::Json;

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
    "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "embd_pdrop",
    "hidden_dropout",    "hidden_dropout_prob",          "resid_pdrop"};

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
        read_(read_attributes(family.checkpoint_type())),
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
    const auto is_other_name = [&name](const auto& alias) { return alias.first == name; };
    if (std::any_of(rules_.aliases.begin(), rules_.aliases.end(), is_other_name)) return;
    const bool known =
        text::has_word(kWithoutEffect, name) || is_among(rules_.without_effect, name);
    if (known || is_among(kMustBeFalse, name) || name == kMustBeTrue) return check(name, value);
    if (is_among(kDropout, name)) return add_dropout(name, value);
    if (name == kQuantization && value.is_null()) return;
    add_unknown(name, value, read_);
  }
  void add_quantization(const Json& object) {
    const Json* const method = object.find("quant_method");
    const auto read = read_attributes(method == nullptr ? "" : method->text());
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
