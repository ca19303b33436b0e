#include <algorithm>
#include <array>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/config/config.h"
#include "ballast/config/hugging_face_config.h"
#include "ballast/core/error.h"
#include "ballast/model/block_layout.h"
#include "ballast/text/files.h"

#include "src/config/config_tree.h"
#include "src/config/key_table.h"

namespace ballast::config {

namespace {

void add_paths(const Section& section, const std::string& prefix, std::set<std::string>& paths) {
  for (const Key& key : section) {
    const std::string path = prefix + key.name;
    paths.insert(path);
    if (key.inner) add_paths(key.inner(), path + ".", paths);
  }
}

/// The paths of all keys and sections, DeepSpeed's keys without effect included.
std::set<std::string> make_paths() {
  Config config;
  std::set<std::string> paths;
  add_paths(all_keys(config), "", paths);
  return paths;
}

}  // namespace

std::string whole_path(const std::string& path,
                       const std::function<void(const std::string&)>& refuse) {
  static const std::set<std::string> all = make_paths();
  if (path.empty() || all.contains(path.substr(0, path.find('.')))) return path;
  std::vector<std::string> found;
  for (const std::string& one : all) {
    if (one.ends_with("." + path)) found.push_back(one);
  }
  if (found.empty()) return path;
  if (found.size() > 1) {
    refuse(
        fmt::format("several sections have '{}'; write one of {}", path, fmt::join(found, ", ")));
  }
  return found.front();
}

namespace {

struct AutoValue {
  std::string_view path;
  Json value;  ///< null: the key's own default
  std::string_view source;
};

/// The keys that Hugging Face's integration fills in from its TrainingArguments, and the values
/// that it would use if the user had set none (transformers 5.23, training_args.py). Keys that
/// support "auto" themselves (batch sizes, buckets, thresholds) are not included.
std::vector<AutoValue> auto_values(Json& root) {
  constexpr std::string_view kTheirs = "the default of transformers";
  const Json* const steps = find_path(root, "ballast.steps");
  const Json* const fp16 = find_path(root, "fp16.enabled");
  const bool half = fp16 != nullptr && fp16->is_boolean() && fp16->flag();
  return {{"gradient_clipping", 1.0, kTheirs},
          {"optimizer.params.lr", 5e-5, kTheirs},
          {"optimizer.params.betas", Json::array({0.9, 0.999}), kTheirs},
          {"optimizer.params.eps", 1e-8, kTheirs},
          {"optimizer.params.weight_decay", 0.0, kTheirs},
          {"scheduler.params.warmup_min_lr", 0.0, kTheirs},
          {"scheduler.params.warmup_max_lr", {}, "optimizer.params.lr"},
          {"scheduler.params.warmup_num_steps", 2, "DeepSpeed's least, because transformers has 0"},
          {"scheduler.params.total_num_steps", steps == nullptr ? Json() : *steps, "ballast.steps"},
          {"bf16.enabled", !half, half ? "fp16 is used" : "which needs no loss scale"},
          {"fp16.enabled", false, "bf16 is used, unless it is off"}};
}

/// Sections in which DeepSpeed ignores every key whose value is "auto", and the keys in them for
/// which "auto" has a meaning here.
constexpr std::array kDropsAuto = {"zero_optimization",
                                   "zero_optimization.offload_optimizer",
                                   "zero_optimization.offload_param",
                                   "fp16",
                                   "bf16",
                                   "tensorboard",
                                   "csv_monitor"};
constexpr std::array<std::string_view, 4> kHaveAuto = {"device", "sub_group_size",
                                                       "stage3_param_persistence_threshold",
                                                       "param_persistence_threshold"};

/// Replaces "auto" by null, which means the default, where DeepSpeed ignores the key.
void drop_auto(Json& root, std::vector<std::string>& log) {
  for (const char* const section : kDropsAuto) {
    Json* const found = find_path(root, section);
    if (found == nullptr) continue;
    const std::string_view path = section;
    const std::string_view name = path.substr(path.find('.') + 1);
    for (const Json::Member& member : std::vector(found->members())) {
      const bool own = std::find(kHaveAuto.begin(), kHaveAuto.end(), member.key) != kHaveAuto.end();
      if (own || !(member.value == "auto") || has_no_effect(name, member.key)) continue;
      (*found)[member.key] = Json();
      log.push_back(fmt::format("{}.{}: \"auto\" is the default", section, printable(member.key)));
    }
  }
}

}  // namespace

void fill_in_optimizer(Document& document, std::vector<std::string>& notes) {
  Json& root = document.root();
  const Json* const given = find_given(root, "optimizer");
  const bool absent = given == nullptr || document.is_set("optimizer");
  if (!absent || find_given(root, "optimizer.type") != nullptr) return;
  if (given != nullptr && !given->is_object()) return;  // is refused when it is read
  Json params = Json::object();
  if (const Json* const own = find_given(root, "optimizer.params")) params = *own;
  if (!params.is_object()) return;
  const Json standard = Json::object(
      {{"lr", 5e-5}, {"betas", Json::array({0.9, 0.999})}, {"eps", 1e-8}, {"weight_decay", 0.0}});
  for (const auto& member : standard.members()) {
    if (find_given(params, member.key) == nullptr) params[member.key] = member.value;
  }
  root["optimizer"]["type"] = "AdamW";
  root["optimizer"]["params"] = params;
  const bool scheduled = find_given(root, "scheduler") != nullptr;
  if (!scheduled) root["scheduler"] = Json::object({{"type", "linear"}});
  notes.push_back(fmt::format(
      "optimizer: not given, so it is that of transformers' Trainer: AdamW with learning rate {} "
      "and weight_decay {}{}; give the section to choose",
      params.find("lr")->compact(), params.find("weight_decay")->compact(),
      scheduled ? "" : ", and the learning rate falls linearly to 0"));
}

void replace_auto(Document& document, std::vector<std::string>& log) {
  Json& root = document.root();
  for (const AutoValue& known : auto_values(root)) {
    Json* const found = find_path(root, known.path);
    if (found == nullptr || !(*found == "auto")) continue;
    *found = known.value;
    log.push_back(fmt::format("{}: \"auto\" is {}{}", known.path,
                              known.value.is_null() ? "" : known.value.compact() + ", ",
                              known.source));
  }
  drop_auto(root, log);
}

void expand_model_path(Document& document, std::vector<std::string>& notes) {
  const Json* const given = find_given(document.root(), "model.path");
  if (given == nullptr || *given == "") return;
  const Json* const model = document.root().find("model");
  const std::filesystem::path folder = Value(document, *given, "model.path").path_text();
  // Keys that no config.json has, those of training alone, and one that may be switched off.
  constexpr std::array kOwn = {
      "vocabulary_tiles",     "layer_tiles",          "router_bias_update_speed",
      "output_router_logits", "router_aux_loss_coef", "router_z_loss_coef",
      model::kPadToken};
  for (const auto& member : model->members()) {
    const bool own = std::find(kOwn.begin(), kOwn.end(), member.key) != kOwn.end();
    const bool skipped = own || member.value.is_null() || is_comment(member.key);
    if (member.key == "path" || skipped) continue;
    document.fail(fmt::format("model.{}", printable(member.key)),
                  fmt::format("model.path ({}) is given too and sets the whole model; remove one",
                              folder.string()));
  }
  if (const auto cause = explain_no_model(folder, given->text())) {
    document.fail("model.path", *cause);
  }
  Json section;
  try {
    section = read_model_section(folder, notes);
  } catch (const Error& error) {
    document.fail("model.path", error.what());
  }
  section["weights"] = folder.string();
  for (const char* key : kOwn) {
    const bool null_counts = key == std::string_view(model::kPadToken);
    const Json* const value = null_counts ? model->find(key) : find_given(*model, key);
    if (value != nullptr) section[key] = *value;
  }
  document.replace_section("model", std::move(section),
                           fmt::format("from {}", (folder / kCheckpointConfig).string()));
}

Config load(const std::filesystem::path& file, std::span<const std::string> overrides,
            std::uint64_t world) {
  return parse(text::read_settings(file, "config"), std::filesystem::absolute(file).parent_path(),
               file.string(), overrides, world);
}

Config parse(const std::string& text, const std::filesystem::path& base, const std::string& name,
             std::span<const std::string> overrides, std::uint64_t world) {
  Document document(text, base, name, overrides, whole_path);
  Config config;
  map_deprecated(document, config.notes);
  fill_in_optimizer(document, config.notes);
  replace_auto(document, config.notes);
  expand_model_path(document, config.notes);
  expand_adapter_path(document);
  read_section(Value(document, document.root(), ""), all_keys(config));
  complete(config, document, world);
  return config;
}

std::string print(const Config& config) {
  Config copy = config;  // the key table needs mutable fields
  return write_section(all_keys(copy)).pretty() + "\n";
}

namespace {

constexpr std::string_view kIndent = "  ";
constexpr auto kNone = std::string_view::npos;

/// The indentation of the line that contains `at`.
std::string_view indent_of(std::string_view text, std::size_t at) {
  const std::size_t line = at == 0 ? 0 : text.rfind('\n', at - 1) + 1;  // npos + 1 is 0
  const std::size_t word = std::min(text.find_first_not_of(" \t", line), text.size());
  return text.substr(line, word - line);
}

bool starts_its_line(std::string_view text, std::size_t at) {
  const std::string_view indent = indent_of(text, at);
  const auto line = static_cast<std::size_t>(indent.data() - text.data());
  return line + indent.size() == at;
}

std::string_view newline_of(std::string_view text) {
  return text.find("\r\n") == kNone ? "\n" : "\r\n";
}

/// `json` with all lines except the first indented.
std::string indented(std::string_view json, std::string_view indent, std::string_view newline) {
  std::string out;
  for (const char c : json) {
    if (c == '\n') {
      out += newline;
      out += indent;
    } else {
      out += c;
    }
  }
  return out;
}

/// The first end of line from `at` on in white space and comments before `limit`; npos if none.
std::size_t end_of_line(std::string_view text, std::size_t at, std::size_t limit) {
  while (at < limit) {
    if (text[at] == '\n') return at > 0 && text[at - 1] == '\r' ? at - 1 : at;
    if (text.substr(at, 2) == "/*") {
      at = text.find("*/", at + 2) + 2;
    } else if (text.substr(at, 2) == "//") {
      at = text.find('\n', at);
    } else {
      ++at;
    }
  }
  return kNone;
}

/// Adds a member at the end of an object.
void insert_member(std::string& text, const Json& object, std::string_view key,
                   std::string_view json) {
  const std::string newline(newline_of(text));
  const std::size_t close = object.end_at() - 1;
  const bool first = object.members().empty();
  const std::size_t last = first ? object.begin_at() + 1 : object.members().back().value.end_at();
  const std::size_t line_end = end_of_line(text, last, close);
  const std::string close_indent(indent_of(text, close));
  if (line_end == kNone) {
    // The object ends on this line: inserts after any comment, before the brace.
    const std::size_t at = text.find_last_not_of(" \t", close - 1) + 1;
    const std::string member =
        fmt::format("{}: {}", Json(key).compact(), indented(json, close_indent, newline));
    text.insert(at, (first ? "" : " ") + member);
    if (!first) text.insert(last, ",");
    return;
  }
  std::string indent = close_indent + std::string(kIndent);
  if (!first && starts_its_line(text, object.members().back().at)) {
    indent = indent_of(text, object.members().back().at);
  }
  // Inserts after the last member's line with its comment; in an empty object after all comments.
  std::size_t at = line_end;
  if (first) at = text.find_last_not_of(" \t\r\n", close - 1) + 1;
  text.insert(at, fmt::format("{}{}{}: {}", newline, indent, Json(key).compact(),
                              indented(json, indent, newline)));
  if (!first) text.insert(last, ",");
}

/// Returns {"a": {"b": json}} on several lines, for missing `keys`.
std::string nested(std::span<const std::string> keys, const std::string& json) {
  if (keys.empty()) return json;
  const std::string inner = nested(keys.subspan(1), json);
  return fmt::format("{{\n{}{}: {}\n}}", kIndent, Json(keys.front()).compact(),
                     indented(inner, kIndent, "\n"));
}

std::vector<std::string> split(const std::string& path) {
  std::vector<std::string> keys;
  for (std::size_t start = 0; start <= path.size();) {
    const std::size_t dot = std::min(path.find('.', start), path.size());
    keys.push_back(path.substr(start, dot - start));
    start = dot + 1;
  }
  return keys;
}

/// Returns `keys` with the name of their section that the text has.
std::vector<std::string> as_written(const Json& root, std::vector<std::string> keys) {
  const std::vector<std::string> written = written_section(root, keys.front());
  keys.erase(keys.begin());
  keys.insert(keys.begin(), written.begin(), written.end());
  return keys;
}

void apply(std::string& text, const Edit& edit, const std::string& name) {
  const Json root = Document(text, ".", name, {}).root();
  const std::vector<std::string> keys = as_written(root, split(edit.path));
  const Json* object = &root;
  std::string so_far;
  for (std::size_t i = 0;; ++i) {
    const auto& members = object->members();
    const auto found = std::find_if(members.begin(), members.end(),
                                    [&](const auto& member) { return member.key == keys[i]; });
    so_far += (i == 0 ? "" : ".") + keys[i];
    if (found == members.end()) {
      const auto missing = std::span(keys).subspan(i + 1);
      return insert_member(text, *object, keys[i], nested(missing, edit.json));
    }
    object = &found->value;
    if (i + 1 == keys.size()) {
      const std::string indent(indent_of(text, found->at));
      text.replace(object->begin_at(), object->end_at() - object->begin_at(),
                   indented(edit.json, indent, newline_of(text)));
      return;
    }
    if (object->is_null()) {
      const std::string section = nested(std::span(keys).subspan(i + 1), edit.json);
      text.replace(object->begin_at(), object->end_at() - object->begin_at(),
                   indented(section, indent_of(text, found->at), newline_of(text)));
      return;
    }
    if (!object->is_object()) {
      throw Error(ErrorCategory::config,
                  fmt::format("{}: {}: is not a JSON object, so {} cannot be set", name, so_far,
                              edit.path));
    }
  }
}

}  // namespace

std::string edit_text(std::string text, std::span<const Edit> edits, const std::string& name) {
  for (const Edit& edit : edits) apply(text, edit, name);
  return text;
}

namespace {

/// The edited text in a file next to `file`, after all checks. commit() replaces `file`.
class EditedFile {
 public:
  EditedFile(const std::filesystem::path& file, std::span<const Edit> edits,
             const std::function<void(const Config&)>& accept)
      : text_(edit_text(text::read_settings(file, "config"), edits, file.string())),
        replaced_(std::filesystem::canonical(file)) {
    replaced_.write(text_);
    accept(parse(text::read_settings(replaced_.temporary(), "config"),
                 std::filesystem::absolute(file).parent_path(), file.string(), {}));
  }
  void commit() { replaced_.commit(); }

 private:
  std::string text_;
  text::ReplacedFile replaced_;
};

}  // namespace

void edit_file(const std::filesystem::path& file, std::span<const Edit> edits,
               const std::function<void(const Config&)>& accept) {
  EditedFile(file, edits, accept).commit();
}

void try_edit(const std::filesystem::path& file, std::span<const Edit> edits,
              const std::function<void(const Config&)>& accept) {
  const EditedFile edited(file, edits, accept);
}

}  // namespace ballast::config
