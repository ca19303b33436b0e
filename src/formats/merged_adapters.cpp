#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "ballast/config/hugging_face_config.h"
#include "ballast/config/stored_model.h"
#include "ballast/core/error.h"
#include "ballast/formats/safetensors_header.h"
#include "ballast/model/family.h"
#include "ballast/text/files.h"

#include "src/formats/adapter_files.h"
#include "src/model/host/team.h"

namespace ballast::formats {
namespace {

namespace fs = std::filesystem;
using text::Json;
using text::printable;
using Shape = std::vector<std::uint64_t>;

constexpr std::string_view kFirst = model::kFirstOfAdapter;
constexpr std::string_view kSecond = model::kSecondOfAdapter;
constexpr std::string_view kSecondBias = ".lora_B.bias";
constexpr std::string_view kFirstOfTokens = ".lora_embedding_A";
constexpr std::string_view kSecondOfTokens = ".lora_embedding_B";
constexpr std::string_view kMagnitudes = ".lora_magnitude_vector";
constexpr std::string_view kTokenRows = ".token_adapter.trainable_tokens_delta";
constexpr std::array kSuffixes = {kFirst,          kSecond,     kSecondBias, kFirstOfTokens,
                                  kSecondOfTokens, kMagnitudes, kTokenRows};
/// PEFT saves the base's tensors of embeddings that have adapters.
constexpr std::string_view kBaseLayer = ".base_layer.";

/// Minimum number of elements of a merged tensor per thread, and number that is read at a time.
constexpr Elems kUnit = Elems{1} << 10;
constexpr Elems kValuesAtATime = Elems{1} << 18;

/// A vector has one column.
std::size_t columns_of(const StoredTensor& tensor) {
  return tensor.shape.size() < 2 ? 1 : tensor.shape.back();
}

bool has_one_of(std::string_view name, std::initializer_list<std::string_view> parts) {
  return std::any_of(parts.begin(), parts.end(), [&](std::string_view part) {
    return name.find(part) != std::string_view::npos;
  });
}

/// Reason why a file with a tensor of this name cannot be merged; empty if it can.
std::string_view cause_of(std::string_view name) {
  if (has_one_of(name, {"_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."})) {
    return "has the name of a wrapped module (torch.compile, FSDP); save the adapters of the "
           "unwrapped model with PEFT's save_pretrained";
  }
  if (has_one_of(name,
                 {".modules_to_save.", ".original_module.", ".lora_A.default.", ".lora_B.default.",
                  ".lora_embedding_A.default", ".lora_embedding_B.default"})) {
    return "has a name of the state of a PEFT model in training; save the adapters with its "
           "save_pretrained";
  }
  return "";
}

}  // namespace

MergedAdapters::MergedAdapters(const WeightFiles& base, const fs::path& folder,
                               const Json& description)
    : base_(base), files_(adapter_weights(folder)), settings_(config::read_merge_settings(folder)) {
  find_ends(description);
  for (const WeightPlace& place : files_.tensors()) add(part_of(place));
  check_complete();
  untie();
}

/// The names of the embedding and of the output matrix, and whether they are tied.
void MergedAdapters::find_ends(const Json& whole) {
  const Json description =
      config::text_model_of(whole, base_.path().parent_path() / config::kCheckpointConfig);
  tokens_ = "model.embed_tokens.weight";
  output_ = model::OuterSpec().output;
  const Json* const type = description.find("model_type");
  std::optional<bool> standard;
  for (const std::string& name : model::family_names()) {
    const model::Family& family = model::family(name);
    if (type == nullptr || !(*type == family.checkpoint_type())) continue;
    const model::OuterSpec outer = family.outer(model::default_config(name));
    tokens_ = outer.tokens;
    output_ = outer.output;
    standard = family.ties_embeddings();
  }
  if (const WeightPlace* const found = base_.find(tokens_)) tokens_ = found->tensor->name;
  if (const WeightPlace* const found = base_.find(output_)) {
    output_ = found->tensor->name;
  } else if (constexpr std::string_view kWrapper = "language_model.";
             tokens_.starts_with(kWrapper)) {
    output_.insert(0, kWrapper);
  }
  const Json* const given = description.find("tie_word_embeddings");
  const bool known = given != nullptr && given->is_boolean();
  tied_ = base_.find(tokens_) != nullptr &&
          (known ? given->flag() : standard.value_or(base_.find(output_) == nullptr));
}

MergedAdapters::AdapterTensor MergedAdapters::part_of(const WeightPlace& place) const {
  std::string name = place.tensor->name;
  if (!name.starts_with(config::kAdapterPrefix)) {
    refuse_adapters(files_,
                    fmt::format("tensor '{}' does not begin with '{}', as PEFT's do; save the "
                                "adapters with PEFT's save_pretrained",
                                printable(name), config::kAdapterPrefix));
  }
  name.erase(0, std::string_view(config::kAdapterPrefix).size());
  const std::string old = std::string(kMagnitudes) + ".weight";  // name in PEFT before 0.11
  if (name.ends_with(old)) name.resize(name.size() - std::string_view(".weight").size());
  if (const std::string_view cause = cause_of(name); !cause.empty()) {
    refuse_adapters(files_, fmt::format("tensor '{}' {}", printable(place.tensor->name), cause));
  }
  for (const std::string_view suffix : kSuffixes) {
    if (!name.ends_with(suffix)) continue;
    return {&place, name.substr(0, name.size() - suffix.size()), std::string(suffix)};
  }
  if (has_one_of(name, {".lora_", "vera_", ".ia3_", ".token_adapter."})) {
    refuse_adapters(files_,
                    fmt::format("tensor '{}' belongs to adapters that Ballast does not have; "
                                "merge them with PEFT",
                                printable(place.tensor->name)));
  }
  return {&place, name, ""};
}

const WeightPlace* MergedAdapters::sibling(const AdapterTensor& part,
                                           const std::string& suffix) const {
  for (const std::string& end : {suffix, suffix + ".weight"}) {
    const std::string name = config::kAdapterPrefix + part.module + end;
    const WeightPlace* const found = files_.find(name);
    if (found != nullptr && found->tensor->name == name) return found;
  }
  return nullptr;
}

void MergedAdapters::add(const AdapterTensor& part) {
  if (const std::string parameter = stack_of(part); !parameter.empty()) {
    if (part.suffix == kFirst) return add_stack(part, parameter);
    if (part.suffix == kSecond && sibling(part, std::string(kFirst)) != nullptr) return;
  }
  if (part.suffix == kFirst) return add_product(part, false);
  if (part.suffix == kFirstOfTokens) return add_product(part, true);
  if (part.suffix == kSecondBias) return add_bias(part);
  if (part.suffix == kTokenRows) return add_tokens(part);
  if (part.suffix.empty()) {
    std::string tensor = part.module;
    if (const auto at = tensor.find(kBaseLayer); at != std::string::npos) {
      tensor.erase(at, kBaseLayer.size() - 1);
    }
    return replace(part, tensor);
  }
  const std::string_view first = part.suffix == kSecondOfTokens ? kFirstOfTokens : kFirst;
  const bool complete = sibling(part, std::string(kFirst)) != nullptr ||
                        sibling(part, std::string(kFirstOfTokens)) != nullptr;
  if (complete && (settings_.dora || part.suffix != kMagnitudes)) return;
  refuse_adapters(files_, complete
                              ? fmt::format("tensor '{}' belongs to DoRA, but adapter_config.json "
                                            "does not say use_dora",
                                            printable(part.place->tensor->name))
                              : fmt::format("tensor '{}' is there without '{}{}{}'",
                                            printable(part.place->tensor->name),
                                            config::kAdapterPrefix, printable(part.module), first));
}

MergedAdapters::TensorChange& MergedAdapters::change_of(const AdapterTensor& part,
                                                        const std::string& name) {
  const WeightPlace* const found = find_in_base(name);
  if (found == nullptr) {
    if (!tied_ || config::name_in_text_model(name) != config::name_in_text_model(output_)) {
      refuse_adapters(files_, fmt::format("tensor '{}' belongs to '{}', which {} lacks",
                                          printable(part.place->tensor->name), printable(name),
                                          base_.path().string()));
    }
  } else if (found->quantized != nullptr &&
             found->quantized->format == QuantizedWeights::Format::mxfp4) {
    refuse_adapters(
        files_,
        fmt::format("tensor '{}' belongs to '{}', which {} has in MXFP4; export "
                    "that model first, and merge with the result",
                    printable(part.place->tensor->name), printable(name), base_.path().string()));
  }
  TensorChange& change = changes_[found == nullptr ? output_ : found->tensor->name];
  change.source = found;  // null for a tied output matrix: see untie()
  return change;
}

void MergedAdapters::replace(const AdapterTensor& part, const std::string& tensor) {
  TensorChange& change = change_of(part, tensor);
  change.replacement = part.place;
  if (change.source == nullptr || change.source->tensor->shape == part.place->tensor->shape) return;
  const Shape& ours = change.source->tensor->shape;
  const Shape& theirs = part.place->tensor->shape;
  const bool resized = ours.size() == 2 && theirs.size() == 2 && ours[1] == theirs[1];
  refuse_adapters(
      files_, fmt::format("tensor '{}' has shape {}, but '{}' of {} has {}{}",
                          printable(part.place->tensor->name), format_shape(theirs),
                          printable(tensor), base_.path().string(), format_shape(ours),
                          resized ? "; the vocabulary was resized in training: resize that model "
                                    "with transformers' resize_token_embeddings and save it first"
                                  : ""));
}

void MergedAdapters::add_product(const AdapterTensor& part, bool embedding) {
  const WeightPlace* const place = base_.find(part.module + ".weight");
  if (place != nullptr && place->stack != nullptr) return add_expert(part, *place);
  TensorChange& change = change_of(part, part.module + ".weight");
  const StoredTensor& a = *part.place->tensor;
  const WeightPlace* const b = sibling(part, std::string(embedding ? kSecondOfTokens : kSecond));
  const std::uint64_t rank = settings_.rank_of(part.module);
  const auto fits = [&](std::size_t in, std::size_t out) {
    return a.shape == Shape{rank, in} && b != nullptr && b->tensor->shape == Shape{out, rank};
  };
  change.rank = rank;
  if (change.source == nullptr) return;  // refused in untie()
  const Shape& shape = change.source->tensor->shape;
  const bool matrix = shape.size() == 2;
  const bool straight = matrix && !embedding && fits(shape[1], shape[0]);
  if (!straight && !(matrix && fits(shape[0], shape[1]))) {
    refuse_adapters(files_,
                    fmt::format("'{}' has no A and B of rank {} for the model's map of shape {}",
                                printable(part.module), rank, format_shape(shape)));
  }
  // A square matrix is transposed as in GPT-2 only if the folder says so.
  const bool input_first = !straight || (shape[0] == shape[1] && settings_.input_first);
  change.scale = static_cast<float>(settings_.scale_of(part.module));
  change.left = read_whole(files_, *b->tensor);
  change.right = read_whole(files_, a);
  change.of_columns = input_first;
  if (settings_.dora) {
    const std::uint64_t out = shape[input_first ? 1 : 0];
    change.magnitudes = sibling(part, std::string(kMagnitudes));
    if (change.magnitudes == nullptr || change.magnitudes->tensor->shape != Shape{out}) {
      refuse_adapters(files_, fmt::format("'{}' has no lora_magnitude_vector of {} values, but "
                                          "adapter_config.json says use_dora",
                                          printable(part.module), out));
    }
  }
  if (!input_first) return;
  std::swap(change.left, change.right);
  change.left = transposed(change.left, rank, shape[0]);
  change.right = transposed(change.right, shape[1], rank);
}

void MergedAdapters::add_bias(const AdapterTensor& part) {
  if (base_.find(part.module + ".bias") == nullptr) {
    refuse_adapters(files_,
                    fmt::format("tensor '{}' is a bias (lora_bias), but the model's map '{}' "
                                "has none, so it cannot be merged",
                                printable(part.place->tensor->name), printable(part.module)));
  }
  TensorChange& change = change_of(part, part.module + ".bias");
  if (part.place->tensor->shape != change.source->tensor->shape) {
    refuse_adapters(files_, fmt::format("tensor '{}' has not the shape of the model's bias",
                                        printable(part.place->tensor->name)));
  }
  change.rank = 1;
  change.scale = static_cast<float>(settings_.scale_of(part.module));
  change.left = read_whole(files_, *part.place->tensor);
  change.right = {1.0F};
}

void MergedAdapters::add_tokens(const AdapterTensor& part) {
  TensorChange& change = change_of(part, part.module + ".weight");
  const std::vector<std::uint64_t>* const tokens = settings_.tokens_of(part.module);
  const Shape& theirs = part.place->tensor->shape;
  change.rows = part.place;
  bool fits = tokens != nullptr && theirs.size() == 2 && theirs[0] == tokens->size();
  if (fits && change.source != nullptr) {
    const Shape& ours = change.source->tensor->shape;
    fits = ours.size() == 2 && ours[1] == theirs[1] &&
           std::all_of(tokens->begin(), tokens->end(), [&](auto token) { return token < ours[0]; });
  }
  if (!fits) {
    refuse_adapters(files_, fmt::format("tensor '{}' with shape {} does not fit the model and "
                                        "trainable_token_indices of adapter_config.json",
                                        printable(part.place->tensor->name), format_shape(theirs)));
  }
  for (std::size_t i = 0; i < tokens->size(); ++i) change.tokens[(*tokens)[i]] = i;
}

void MergedAdapters::check_complete() const {
  for (const auto& [name, change] : changes_) {
    const bool both = change.rows != nullptr && (change.rank > 0 || change.replacement != nullptr);
    if (!both) continue;
    refuse_adapters(files_,
                    fmt::format("'{}' has rows of trained tokens and another adapter; merge "
                                "these with PEFT",
                                printable(name)));
  }
}

void MergedAdapters::refuse_tied(bool of_output) const {
  const std::string& one = of_output ? output_ : tokens_;
  const std::string& other = of_output ? tokens_ : output_;
  refuse_adapters(
      files_, fmt::format("there are adapters of '{}', which the model ties to '{}': merging would "
                          "change both, and the merged model would not compute what was trained; "
                          "train them over a model that is not tied (tie_word_embeddings false)",
                          one, other));
}

void MergedAdapters::untie() {
  const auto of_tokens = changes_.find(tokens_);
  const auto of_output = changes_.find(output_);
  const bool input = of_tokens != changes_.end();
  const bool output = of_output != changes_.end();
  if (!tied_ || (!input && !output)) return;
  const bool own = base_.find(output_) != nullptr;  // whether the output matrix is a copy
  if (output && of_output->second.replacement == nullptr) refuse_tied(true);
  if (output && of_output->second.rank > 0) refuse_tied(true);
  if (input && of_tokens->second.rank > 0) refuse_tied(false);
  if (input && of_tokens->second.rows != nullptr) {
    if (output) refuse_tied(true);
    if (own) changes_[output_] = of_tokens->second;  // PEFT trains such rows of both
    return;
  }
  const bool same = input && output &&
                    have_equal_values(files_, *of_tokens->second.replacement->tensor,
                                      *of_output->second.replacement->tensor);
  if (same) {
    if (!own) changes_.erase(of_output);
    return;
  }
  unties_ = true;
  const WeightPlace* const embedding = base_.find(tokens_);
  if (!own) added_ = {output_, embedding};
  if (!output || own) return;
  TensorChange& change = of_output->second;
  change.source = embedding;
  if (change.replacement->tensor->shape == embedding->tensor->shape) return;
  refuse_adapters(files_, fmt::format("tensor '{}' has shape {}, but the model's embedding has {}",
                                      printable(change.replacement->tensor->name),
                                      format_shape(change.replacement->tensor->shape),
                                      format_shape(embedding->tensor->shape)));
}

const WeightPlace* MergedAdapters::source(const std::string& name) const {
  return added_ && added_->name == name ? added_->like : base_.find(name);
}

void MergedAdapters::apply(const std::string& name, Elems first, std::span<float> values) {
  TensorChange& change = changes_.at(name);
  if (change.replacement != nullptr) files_.read(change.replacement->tensor->name, values, first);
  if (change.rows != nullptr) return put_tokens(change, first, values);
  if (change.rank == 0 && change.parts.empty()) return;
  if (change.magnitudes != nullptr && first == 0) compute_dora_scales(change);
  model::host::split(values.size(), kUnit, [&](model::host::Range r) {
    const std::span<float> part = values.subspan(r.begin, r.size());
    add_to(change, first + r.begin, part);
    add_parts_to(change, first + r.begin, part);
    if (change.dora_scales.empty()) return;
    const std::size_t columns = columns_of(*change.source->tensor);
    for (std::size_t i = 0; i < part.size(); ++i) {
      const std::size_t at = first + r.begin + i;
      part[i] *= change.dora_scales[change.of_columns ? at % columns : at / columns];
    }
  });
}

void MergedAdapters::add_to(const TensorChange& change, Elems first,
                            std::span<float> values) const {
  const std::size_t columns = columns_of(*change.source->tensor);
  std::vector<float> sums;
  while (change.rank > 0 && !values.empty()) {
    const std::size_t row = first / columns;
    const std::size_t column = first % columns;
    const std::size_t count = std::min(values.size(), columns - column);
    sums.assign(count, 0.0F);
    for (std::size_t k = 0; k < change.rank; ++k) {
      const float factor = change.left[row * change.rank + k];
      const float* const from = change.right.data() + k * columns + column;
      for (std::size_t i = 0; i < count; ++i) sums[i] += factor * from[i];
    }
    for (std::size_t i = 0; i < count; ++i) values[i] += change.scale * sums[i];
    values = values.subspan(count);
    first += count;
  }
}

void MergedAdapters::put_tokens(const TensorChange& change, Elems first,
                                std::span<float> values) const {
  const std::size_t columns = columns_of(*change.source->tensor);
  const Elems end = first + values.size();
  for (auto token = change.tokens.lower_bound(first / columns);
       token != change.tokens.end() && token->first * columns < end; ++token) {
    const Elems begin = std::max<Elems>(first, token->first * columns);
    const Elems count = std::min<Elems>(end, (token->first + 1) * columns) - begin;
    files_.read(change.rows->tensor->name, values.subspan(begin - first, count),
                token->second * columns + begin - token->first * columns);
  }
}

void MergedAdapters::compute_dora_scales(TensorChange& change) const {
  change.dora_scales = read_whole(files_, *change.magnitudes->tensor);
  const std::size_t rows = change.source->tensor->shape[0];
  const std::size_t columns = change.source->tensor->shape[1];
  std::vector<double> squares(change.dora_scales.size(), 0.0);
  std::vector<float> values;
  for (std::size_t row = 0; row < rows; row += values.size() / columns) {
    const std::size_t count = std::clamp<std::size_t>(kValuesAtATime / columns, 1, rows - row);
    values.resize(count * columns);
    if (change.replacement != nullptr) {
      files_.read(change.replacement->tensor->name, values, row * columns);
    } else {
      base_.read(change.source->tensor->name, values, row * columns);
    }
    model::host::split(count, 1, [&](model::host::Range r) {
      const Elems first = r.begin * columns;
      add_to(change, row * columns + first, std::span(values).subspan(first, r.size() * columns));
    });
    // Each thread has separate norms.
    model::host::split(change.of_columns ? columns : count, 1, [&](model::host::Range r) {
      const model::host::Range of_rows = change.of_columns ? model::host::Range{0, count} : r;
      const model::host::Range of_columns = change.of_columns ? r : model::host::Range{0, columns};
      for (std::size_t i = of_rows.begin; i < of_rows.end; ++i) {
        for (std::size_t j = of_columns.begin; j < of_columns.end; ++j) {
          const double value = values[i * columns + j];
          squares[change.of_columns ? j : row + i] += value * value;
        }
      }
    });
  }
  for (std::size_t i = 0; i < squares.size(); ++i) {
    change.dora_scales[i] =
        squares[i] > 0.0 ? static_cast<float>(change.dora_scales[i] / std::sqrt(squares[i])) : 0.0F;
  }
}

fs::path base_of_adapters(const fs::path& folder) {
  const fs::path path = folder / config::kAdapterConfig;
  const std::string file = path.string();
  const Json settings = text::parse_json(text::read_settings(path, "adapters"), file,
                                         {.category = ErrorCategory::data});
  const Json* const base = settings.find("base_model_name_or_path");
  if (base == nullptr || !base->is_string() || base->text().empty()) {
    throw Error(ErrorCategory::data,
                fmt::format("{}: names no base_model_name_or_path to merge with: training began "
                            "with random weights; set it to the folder of the model",
                            file));
  }
  std::error_code ignored;
  const std::string shown = printable(base->text());
  if (!fs::exists(base->text(), ignored)) {
    const bool of_hub = !base->text().starts_with('.') &&
                        std::count(base->text().begin(), base->text().end(), '/') == 1;
    throw Error(
        ErrorCategory::data,
        fmt::format("{}: base_model_name_or_path {} does not exist{}; {}set it to the folder "
                    "of the model",
                    file, shown, of_hub ? " here (it may be a model of the Hub)" : "",
                    of_hub ? "download the model and " : ""));
  }
  if (is_adapter_folder(base->text()) &&
      !fs::exists(fs::path(base->text()) / "config.json", ignored)) {
    throw Error(ErrorCategory::data,
                fmt::format("{}: base_model_name_or_path {} contains adapters itself; merge those "
                            "first (ballast export --merged) and set it to the result",
                            file, shown));
  }
  return base->text();
}

}  // namespace ballast::formats
