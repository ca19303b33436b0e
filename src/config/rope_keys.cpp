#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

#include <fmt/format.h>

#include "ballast/config/stored_model.h"
#include "ballast/core/error.h"

#include "src/config/config_tree.h"

namespace ballast::config {
namespace {

using text::Json;

constexpr const char* kTheta = "rope_theta";
constexpr const char* kPart = "partial_rotary_factor";
constexpr const char* kScaling = "rope_scaling";
constexpr const char* kParameters = "rope_parameters";
constexpr const char* kType = "rope_type";
constexpr const char* kOldType = "type";
constexpr const char* kFactor = "factor";
constexpr const char* kLocal = "sliding_attention";
constexpr const char* kGlobal = "full_attention";
constexpr const char* kLocalTheta = "rope_local_base_freq";
constexpr const char* kTrained = "original_max_position_embeddings";
constexpr const char* kLongest = "max_position_embeddings";
constexpr const char* kHead = "head_dim";
constexpr const char* kTruncate = "truncate";
constexpr const char* kProportional = "proportional";
constexpr const char* kGrowth = "llama_4_scaling_beta";
constexpr const char* kAlpha = "alpha";

/// Reads the keys of one config.json.
class RopeReader {
 public:
  RopeReader(const Json& json, const model::Family& family, const std::string& file,
             std::vector<std::string>& notes)
      : json_(json),
        family_(family),
        rules_(family.checkpoint_rules().rope),
        file_(file),
        notes_(notes) {}

  /// The keys of the model section.
  [[nodiscard]] Json read() const { return rules_.by_layer_type ? by_layer_type() : usual(); }

 private:
  [[noreturn]] void refuse(const std::string& name, const Json& value,
                           const std::string& rule) const {
    constexpr std::size_t kShown = 60;
    throw Error(ErrorCategory::config, fmt::format("{}: {} is {}, but {}", file_, name,
                                                   text::printable(value.compact(), kShown), rule));
  }
  [[nodiscard]] std::string class_name() const {
    return fmt::format("transformers' {}", family_.checkpoint_class());
  }
  void note_unread(const std::string& name, const Json& value, const std::string& reason) const {
    notes_.push_back(fmt::format("model.path: {} is {} in {}, but {} {}", name,
                                 text::printable(value.compact()), file_, class_name(), reason));
  }
  [[nodiscard]] Json standard(std::string_view name) const {
    for (const model::DetailKey& detail : family_.details()) {
      if (detail.name == name) return detail.standard;
    }
    return {};
  }
  /// An object of the file, empty if it is missing, null or empty.
  [[nodiscard]] Json object(const Json& in, const char* key, const std::string& name) const {
    const Json* const found = find_given(in, key);
    if (found == nullptr) return Json::object();
    if (!found->is_object()) refuse(name, *found, "it must be an object; give one or remove it");
    return *found;
  }
  /// The value that applies: that of the parameters, otherwise that of the config itself, otherwise
  /// the class's default. `name` is that of the parameters in the file.
  [[nodiscard]] Json chosen(const Json& parameters, const std::string& name, const char* inner,
                            const std::string& outer, const Json& standard) const {
    const Json* found = parameters.find(inner);
    const std::string found_as = found == nullptr ? outer : fmt::format("{}.{}", name, inner);
    if (found == nullptr && !outer.empty()) found = json_.find(outer);
    if (found == nullptr) return standard;
    if (found->is_null() && rules_.zero_theta && std::string_view(inner) == kTheta) return Json(0);
    if (found->is_null()) {
      refuse(found_as, *found,
             fmt::format("{} needs a number; give one or remove the key", class_name()));
    }
    return *found;
  }
  /// The rotated part of a head if no key gives it as a part.
  [[nodiscard]] Json standard_part() const {
    const Json* const width =
        rules_.part_width.empty() ? nullptr : find_given(json_, rules_.part_width);
    if (width == nullptr) return standard(kPart);
    const Json* head = find_given(json_, kHead);
    Json usual;
    for (const model::CheckpointKey& key : family_.checkpoint_keys()) {
      if (head == nullptr && key.name == kHead) usual = key.standard;
    }
    if (head == nullptr) head = &usual;
    if (!width->is_number() || !head->is_number() || !(head->number() > 0.0)) {
      refuse(rules_.part_width, *width, "it must be a number of values, and head_dim too");
    }
    return Json(width->number() / head->number());
  }
  [[nodiscard]] double longest() const {
    const Json* const found = find_given(json_, kLongest);
    if (found == nullptr) return static_cast<double>(rules_.longest);
    if (!found->is_number() || !(found->number() > 0.0)) {
      refuse(kLongest, *found, "it must be a number of tokens above 0");
    }
    return found->number();
  }
  [[nodiscard]] Json longest_json() const {
    const Json* const found = find_given(json_, kLongest);
    return found == nullptr ? Json(rules_.longest) : *found;
  }

  [[nodiscard]] Json usual() const;
  [[nodiscard]] Json by_layer_type() const;
  /// The parameters that apply, and their name in the file.
  [[nodiscard]] std::pair<Json, std::string> parameters() const;
  void refuse_objects(const Json& parameters, const std::string& name) const;
  void check_part(const Json& parameters, const std::string& name, const std::string& type) const;
  void check_unread(const char* name, const Json& counts) const;
  [[nodiscard]] std::string type_of(const Json& parameters, const std::string& name) const;
  [[nodiscard]] Json scaling(const Json& parameters, const std::string& type) const;
  void fill_in(Json& scaling, const Json& parameters, const std::string& type) const;

  const Json& json_;
  const model::Family& family_;
  model::CheckpointRope rules_;
  const std::string& file_;
  std::vector<std::string>& notes_;
};

std::pair<Json, std::string> RopeReader::parameters() const {
  Json scaling = object(json_, kScaling, kScaling);
  Json parameters = object(json_, kParameters, kParameters);
  if (!scaling.members().empty()) {
    if (!parameters.members().empty() && !are_equal(scaling, parameters)) {
      note_unread(kParameters, parameters, "takes rope_scaling, which is given too");
    }
    return {std::move(scaling), kScaling};
  }
  if (find_given(json_, kParameters) == nullptr && !rules_.standard.is_null()) {
    return {rules_.standard, kParameters};
  }
  return {std::move(parameters), kParameters};
}

/// Refuses parameters by type of layer, which the class does not have.
void RopeReader::refuse_objects(const Json& parameters, const std::string& name) const {
  for (const auto& [key, value, at] : parameters.members()) {
    if (!value.is_object()) continue;
    refuse(fmt::format("{}.{}", name, text::printable(key)), value,
           fmt::format("{} has the same rotary positions in all layers; give the weights of "
                       "another model",
                       class_name()));
  }
}

std::string RopeReader::type_of(const Json& parameters, const std::string& name) const {
  const char* const key = parameters.find(kType) != nullptr ? kType : kOldType;
  const Json* const found = parameters.find(key);
  if (found == nullptr) return "default";
  if (!found->is_string() || (*found == "su" && !rules_.trained)) {
    refuse(fmt::format("{}.{}", name, key), *found,
           fmt::format("{} has no such type", class_name()));
  }
  // Older versions of Phi-3's class had these names for longrope.
  if (rules_.trained && (*found == "su" || *found == "yarn")) return "longrope";
  return found->text();
}

/// Checks the rotated part of a head if the class does not read it from the config itself.
void RopeReader::check_part(const Json& parameters, const std::string& name,
                            const std::string& type) const {
  // Then another key of the family gives the part.
  if (std::ranges::find(rules_.unread, kPart) != rules_.unread.end()) return;
  const Json* found = parameters.find(kPart);
  const std::string place = found == nullptr ? kPart : fmt::format("{}.{}", name, kPart);
  if (found == nullptr) found = find_given(json_, kPart);
  if (found == nullptr || (found->is_number() && found->number() == 1.0)) return;
  if (type == kProportional) return;
  if (type == "default") return note_unread(place, *found, "rotates whole heads");
  refuse(place, *found,
         fmt::format("{} scales only the rotary positions of whole heads; give the weights of "
                     "another model",
                     class_name()));
}

/// Refuses a key that the class does not read, since it has another name for it.
void RopeReader::check_unread(const char* name, const Json& counts) const {
  const Json* const found = find_given(json_, name);
  if (found == nullptr || are_equal(*found, counts)) return;
  refuse(name, *found,
         fmt::format("{} does not read this key and takes {}; remove it", class_name(),
                     counts.compact()));
}

/// model.rope_scaling for the parameters; null if positions are not scaled.
Json RopeReader::scaling(const Json& parameters, const std::string& type) const {
  Json out = Json::object({{kType, type}});
  if (const Json* const alpha = find_given(parameters, kAlpha);
      rules_.alpha && type == "dynamic" && alpha != nullptr && alpha->number() != 0.0) {
    out[kAlpha] = Json(*alpha);
    return out;
  }
  constexpr std::array kElsewhere = {kType, kOldType, kTheta, kPart};
  for (const auto& [key, value, at] : parameters.members()) {
    if (value.is_null() || value.is_object()) continue;
    const bool is_own = key == kPart && type == kProportional;
    if (!is_own && std::find(kElsewhere.begin(), kElsewhere.end(), key) != kElsewhere.end()) {
      continue;
    }
    const auto& unread = rules_.unread;
    if (std::find(unread.begin(), unread.end(), key) == unread.end()) out[key] = value;
  }
  fill_in(out, parameters, type);
  const bool plain = type == "default" && out.members().size() == 1;
  return plain && rules_.standard.is_null() ? Json() : out;
}

/// Adds what the type takes from other keys, and removes what it does not read.
void RopeReader::fill_in(Json& scaling, const Json& parameters, const std::string& type) const {
  const bool is_longrope = type == "longrope";
  if (is_longrope || type == "yarn" || type == "llama3") {
    const Json* const outer = rules_.by_layer_type ? nullptr : find_given(json_, kTrained);
    if (outer != nullptr) {
      scaling[kTrained] = Json(*outer);
    } else if (rules_.trained) {
      scaling[kTrained] = *rules_.trained;
    } else if (scaling.find(kTrained) == nullptr) {
      scaling[kTrained] = longest_json();
    }
  } else if (type == "dynamic") {
    scaling[kTrained] = longest_json();
  } else if (scaling.find(kGrowth) == nullptr) {
    scaling.erase(kTrained);
  }
  const Json* const trained = scaling.find(kTrained);
  const bool divides = scaling.find(kFactor) == nullptr && trained != nullptr &&
                       trained->is_number() && trained->number() > 0.0;
  // A missing factor of yarn is an error of transformers, too.
  const bool asks = is_longrope || (type == "yarn" && parameters.find(kFactor) != nullptr);
  if (divides && asks) scaling[kFactor] = longest() / trained->number();
  if (type != "yarn") return;
  const auto is_zero = [&scaling](const char* key) {
    const Json* const found = scaling.find(key);
    return found != nullptr && found->is_number() && found->number() == 0.0;
  };
  for (const char* const key : {"beta_fast", "beta_slow"}) {
    if (is_zero(key)) scaling.erase(key);  // the class then uses its default
  }
  if (is_zero("mscale") || is_zero("mscale_all_dim")) {
    scaling.erase("mscale");
    scaling.erase("mscale_all_dim");
  }
}

Json RopeReader::usual() const {
  const auto [given, name] = parameters();
  refuse_objects(given, name);
  const std::string type = type_of(given, name);
  Json keys = Json::object();
  keys[kTheta] = chosen(given, name, kTheta, rules_.theta, standard(kTheta));
  if (rules_.part.empty()) {
    check_part(given, name, type);
  } else {
    keys[kPart] = chosen(given, name, kPart, rules_.part, standard_part());
    if (rules_.part != kPart) check_unread(kPart, keys[kPart]);
  }
  if (rules_.theta != kTheta) check_unread(kTheta, keys[kTheta]);
  keys[kScaling] = scaling(given, type);
  return keys;
}

Json RopeReader::by_layer_type() const {
  const Json parameters = object(json_, kParameters, kParameters);
  for (const auto& [key, value, at] : parameters.members()) {
    if (key == kLocal || key == kGlobal || value.is_null()) continue;
    refuse(fmt::format("{}.{}", kParameters, text::printable(key)), value,
           fmt::format("{} reads these keys by type of layer, in {}.{} and {}.{}; move it there",
                       class_name(), kParameters, kGlobal, kParameters, kLocal));
  }
  const std::string global_name = fmt::format("{}.{}", kParameters, kGlobal);
  const std::string local_name = fmt::format("{}.{}", kParameters, kLocal);
  Json global = object(parameters, kGlobal, global_name);
  const Json local = object(parameters, kLocal, local_name);
  if (global.members().empty()) {
    global = rules_.standard.is_null() ? Json::object({{kType, "default"}}) : rules_.standard;
  }
  const Json scaled = object(json_, kScaling, kScaling);
  for (const auto& [key, value, at] : scaled.members()) {
    global[key] = value;
  }
  const std::string type = type_of(global, global_name);
  Json keys = Json::object();
  keys[kTheta] = chosen(global, global_name, kTheta, kTheta, standard(kTheta));
  keys[kLocalTheta] = chosen(local, local_name, kTheta, rules_.local_theta, standard(kLocalTheta));
  check_part(global, global_name, type);
  if (const Json* const truncate = find_given(global, kTruncate);
      type == "yarn" && truncate != nullptr && !truncate->flag()) {
    refuse(fmt::format("{}.{}", global_name, kTruncate), *truncate,
           fmt::format("{} does not read it there; remove it", class_name()));
  }
  for (const auto& [key, value, at] : local.members()) {
    const bool plain = (key == kType || key == kOldType) && value == "default";
    if (value.is_null() || key == kTheta || key == kPart || plain) continue;
    refuse(fmt::format("{}.{}", local_name, text::printable(key)), value,
           "Ballast scales only the rotary positions of layers without a window; give the weights "
           "of another model");
  }
  keys[kScaling] = scaling(global, type);
  return keys;
}

}  // namespace

Json with_rope_keys(Json json, const model::Family& family, const std::string& file,
                    std::vector<std::string>& notes) {
  const model::CheckpointRope rules = family.checkpoint_rules().rope;
  if (rules.longest == 0 || !json.is_object()) return json;
  if (rules.ignores_scaling) json.erase(kScaling);
  const Json keys = RopeReader(json, family, file, notes).read();
  for (const std::string_view read :
       {std::string_view(kScaling), std::string_view(kParameters), std::string_view(kPart),
        std::string_view(rules.theta), std::string_view(rules.part),
        std::string_view(rules.part_width)}) {
    json.erase(read);
  }
  if (!rules.by_layer_type) json.erase(kTrained);
  for (const auto& [key, value, at] : keys.members()) json[key] = value;
  return json;
}

namespace {

/// Moves the keys of rotary positions into rope_parameters, for classes that read nothing else.
void nest_rope_keys(Json& out) {
  const Json* const scaling = find_given(out, kScaling);
  Json global = scaling == nullptr ? Json::object({{kType, "default"}}) : Json(*scaling);
  global[kTheta] = Json(*out.find(kTheta));
  const Json local = Json::object({{kType, "default"}, {kTheta, Json(*out.find(kLocalTheta))}});
  for (const char* const key : {kScaling, kTheta, kLocalTheta}) out.erase(key);
  out[kParameters][kGlobal] = global;
  out[kParameters][kLocal] = local;
}

/// Moves rope_scaling into rope_parameters, with the base.
void nest_scaling(Json& out) {
  const Json* const scaling = find_given(out, kScaling);
  if (scaling == nullptr) return;
  Json all = *scaling;
  all[kTheta] = Json(*out.find(kTheta));
  out.erase(kScaling);
  out[kParameters] = all;
}

}  // namespace

void add_rope_keys(Json& out, const model::Family& family) {
  const model::CheckpointRope rules = family.checkpoint_rules().rope;
  if (const Json* const theta = out.find(kTheta);
      rules.zero_theta && theta != nullptr && theta->is_number() && theta->number() == 0.0) {
    out[kTheta] = Json();
    return;
  }
  if (rules.ignores_scaling) return nest_scaling(out);
  const auto copy = [&out](const Json* from, std::string_view to) {
    if (from != nullptr && !to.empty()) out[to] = Json(*from);
  };
  copy(find_given(out, kTheta), rules.theta);
  copy(find_given(out, kPart), rules.part);
  // Some classes take rope_scaling for rope_parameters.
  const auto aliases = family.checkpoint_rules().aliases;
  const bool nests =
      std::ranges::any_of(aliases, [](const auto& pair) { return pair.first == kScaling; });
  if (rules.by_layer_type && (nests || !rules.standard.is_null())) return nest_rope_keys(out);
  if (rules.by_layer_type && rules.local_theta.empty()) {
    const Json local = *out.find(kLocalTheta);
    out.erase(kLocalTheta);
    // rope_scaling and rope_theta describe the other layers.
    out[kParameters][kGlobal] = Json::object({{kType, "default"}});
    out[kParameters][kLocal] = Json::object({{kType, "default"}, {kTheta, local}});
  }
  const Json* const scaling = find_given(out, kScaling);
  const Json* const trained = scaling == nullptr ? nullptr : find_given(*scaling, kTrained);
  if (trained == nullptr) return;
  const Json tokens = *trained;
  const Json* const type = find_given(*scaling, kType);
  const bool dynamic = type != nullptr && *type == "dynamic";
  // Added keys move `scaling`, which is a part of `out`.
  if (rules.trained) out[kTrained] = tokens;
  if (dynamic) out[kLongest] = tokens;
}

Json with_separate_rope_keys(Json section) {
  Json* const scaling = section.find(kScaling);
  if (scaling == nullptr || !scaling->is_object()) return section;
  Json rest = *scaling;
  for (const char* const key : {kTheta, kPart}) {
    const Json* const inner = find_given(rest, key);
    if (inner == nullptr || section.find(key) == nullptr) continue;
    section[key] = Json(*inner);
    rest.erase(key);
  }
  *section.find(kScaling) = std::move(rest);
  return section;
}

bool has_rope_keys(const Json& json) {
  const auto given = [&json](const char* key) { return find_given(json, key) != nullptr; };
  return given(kScaling) || given(kParameters) || given(kTheta) || given(kPart) ||
         given(kLocalTheta) || given("rotary_emb_base") || given("rotary_pct") ||
         given("rotary_dim");
}

}  // namespace ballast::config
