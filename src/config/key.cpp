#include "src/config/key.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/core/error.h"
#include "ballast/core/units.h"

namespace ballast::config {
namespace {

std::string_view last_part(std::string_view path) {
  return path.substr(path.rfind('.') + 1);  // npos + 1 is 0
}

/// Returns "must be above 0", "must be at least 0 and below 1".
std::string rule(const RealRange& range) {
  std::string text = fmt::format("must be {} {}", range.open_low ? "above" : "at least", range.low);
  if (range.high < RealRange().high) {
    text += fmt::format(" and {} {}", range.open_high ? "below" : "at most", range.high);
  }
  return text;
}

void check_range(const Value& value, std::uint64_t number, WholeRange range) {
  if (number < range.low) value.fail(fmt::format("must be at least {}, got {}", range.low, number));
  if (number > range.high)
    value.fail(fmt::format("must be at most {}, got {}", range.high, number));
}

/// The value as a non-negative whole number; empty if it is not one.
std::optional<std::uint64_t> as_whole(const Value& value, WholeRange range) {
  const Json& json = value.json();
  if (const auto whole = json.whole()) return whole;
  if (!json.is_number()) return std::nullopt;
  const double number = json.number();  // 5e8 is a whole number, too
  if (!std::isfinite(number)) return std::nullopt;
  if (number != std::floor(number)) return std::nullopt;
  if (number < 0) value.fail(fmt::format("must be at least {}, got {}", range.low, json.text()));
  if (number > 0x1p53)
    value.fail(fmt::format("must be at most {}, got {}", range.high, json.text()));
  return static_cast<std::uint64_t>(number);
}

/// Suggests keys anywhere in the config that end in `name`, or that other programs call `name`; ""
/// if there are none, or too many.
std::string suggestion_elsewhere(const std::string& name) {
  constexpr std::size_t kMax = 3;
  static const std::vector<KeyInfo> all = key_list();
  std::vector<std::string> found;
  for (const KeyInfo& key : all) {
    const auto& others = key.other_names;
    if (last_part(key.path) == name || std::ranges::find(others, name) != others.end()) {
      found.push_back(fmt::format("'{}'", key.path));
    }
  }
  if (found.empty() || found.size() > kMax) return "";
  return fmt::format(" (did you mean {}?)", fmt::join(found, " or "));
}

/// Suggestion for an unknown key, or "".
std::string suggestion(const std::string& name, const Section& section) {
  std::vector<std::string> names;
  for (const auto& key : section) {
    const auto& others = key.other_names;
    if (std::find(others.begin(), others.end(), name) != others.end()) {
      return fmt::format(" (did you mean '{}'?)", key.name);
    }
    names.push_back(key.name);
  }
  constexpr std::size_t kLongestName = 64;
  if (name.size() > kLongestName) return "";
  const std::string elsewhere = suggestion_elsewhere(name);
  const std::string near = nearest(name, names);
  // "lr" at the top is the learning rate, not a misspelt key.
  return near.empty() || !elsewhere.empty() ? elsewhere : did_you_mean(name, names);
}

}  // namespace

bool is_comment(std::string_view name) {
  return name.starts_with('_') || name.starts_with("//") || name.starts_with('#') ||
         name == "comment" || name == "comments";
}

Value Value::member(const std::string& name) const {
  const Json* const found = json_->find(name);
  expects(found != nullptr, "a config member must exist before it is read");
  return {*document_, *found, path_.empty() ? name : path_ + "." + name};
}

Value Value::element(std::size_t index) const {
  return {*document_, json_->elements().at(index), fmt::format("{}[{}]", path_, index)};
}

std::vector<Value> Value::elements(std::string_view expected) const {
  if (!json_->is_array()) fail_type(expected);
  std::vector<Value> values;
  for (std::size_t i = 0; i < json_->elements().size(); ++i) values.push_back(element(i));
  return values;
}

bool Value::flag() const {
  if (!json_->is_boolean()) fail_type("true or false");
  return json_->flag();
}

std::uint64_t Value::whole(WholeRange range) const {
  const auto number = as_whole(*this, range);
  if (!number) fail_type("a whole number");
  check_range(*this, *number, range);
  return *number;
}

double Value::real(RealRange range) const {
  if (!json_->is_number()) fail_type("a number");
  const double number = json_->number();
  if (!std::isfinite(number)) fail_type("a finite number");
  const bool above = range.open_low ? number > range.low : number >= range.low;
  const bool below = range.open_high ? number < range.high : number <= range.high;
  if (!above || !below) fail(fmt::format("{}, got {}", rule(range), json_->text()));
  return number;
}

std::uint64_t Value::bytes(WholeRange range) const {
  if (!json_->is_string() || is_auto()) {
    const auto number = as_whole(*this, range);
    if (!number) fail_type(kSizeForm);
    check_range(*this, *number, range);
    return *number;
  }
  std::uint64_t number = 0;
  try {
    number = parse_bytes(json_->text());
  } catch (const Error&) {
    fail_type(kSizeForm);
  }
  check_range(*this, number, range);
  return number;
}

std::string Value::text() const {
  if (!json_->is_string() || is_auto()) fail_type("a string");
  return json_->text();
}

std::string Value::choice(const std::vector<std::string>& choices) const {
  const bool known = json_->is_string() &&
                     std::find(choices.begin(), choices.end(), json_->text()) != choices.end();
  if (!known) fail_choice(choices);
  return json_->text();
}

void Value::fail_choice(const std::vector<std::string>& choices) const {
  std::string expected = choices.size() == 1 ? "" : "one of ";
  for (const auto& item : choices) expected += (&item == choices.data() ? "" : ", ") + item;
  if (!json_->is_string() || is_auto()) fail_type(expected);
  const auto& found = json_->text();
  constexpr std::size_t kLongestName = 64;
  fail(fmt::format("expected {}, got {}{}", expected, json_->described(),
                   found.size() > kLongestName ? "" : did_you_mean(found, choices)));
}

std::string Value::path_text() const {
  const std::string found = text();
  if (found.empty()) fail("expected a path, got an empty string");
  if (found.find('\0') != std::string::npos) fail("a path cannot contain a zero byte");
  return (document_->base() / found).lexically_normal().string();
}

void Value::fail_type(std::string_view expected) const {
  if (is_auto()) fail(fmt::format("\"auto\" is not accepted here; expected {}", expected));
  fail(fmt::format("expected {}, got {}", expected, json_->described()));
}

void read_section(const Value& value, const Section& section) {
  if (!value.json().is_object()) value.fail_type("an object");
  for (const auto& item : value.json().members()) {
    const bool known = std::any_of(section.begin(), section.end(),
                                   [&](const Key& key) { return key.name == item.key; });
    if (known || is_comment(item.key)) continue;
    value.member(item.key).fail("unknown key" + suggestion(item.key, section));
  }
  for (const auto& key : section) {
    const Json* const found = value.json().find(key.name);
    if (found != nullptr && !found->is_null()) key.read(value.member(key.name));
  }
}

Json write_section(const Section& section) {
  Json out = Json::object();
  for (const auto& key : section) {
    if (key.write) out[key.name] = key.write();
  }
  return out;
}

Key section(std::string name, const std::function<Section()>& keys) {
  Key key = {std::move(name), [keys](const Value& value) { read_section(value, keys()); },
             [keys] { return write_section(keys()); }};
  key.inner = keys;
  return key;
}

Key switched_section(std::string name, const std::function<Section()>& keys,
                     std::vector<std::string>& log) {
  Key key = section(std::move(name), keys);
  key.read = [read = std::move(key.read), keys, &log](const Value& value) {
    const Json* const enabled = value.json().find("enabled");
    const bool off = enabled != nullptr && enabled->is_boolean() && !enabled->flag();
    if (!off) return read(value);
    for (const auto& member : value.json().members()) {
      Json one = Json::object();
      one.add(member.key, member.value);
      try {
        read_section(value.with(one), keys());
      } catch (const Error&) {
        log.push_back(fmt::format("{}: not used, because the section is off",
                                  value.member(member.key).path()));
      }
    }
  };
  return key;
}

Key real(std::string name, double& target, RealRange range) {
  return {std::move(name), [&target, range](const Value& value) { target = value.real(range); },
          [&target] { return Json(target); }};
}

Key flag(std::string name, bool& target) {
  return {std::move(name),
          [&target](const Value& value) { target = value.flag(); },
          [&target] { return Json(target); },
          {},
          {"true", "false"}};
}

Key bytes(std::string name, std::uint64_t& target, WholeRange range) {
  return {std::move(name), [&target, range](const Value& value) { target = value.bytes(range); },
          [&target] { return Json(target); }};
}

Key choice(std::string name, std::string& target, std::vector<std::string> choices) {
  const auto read = [&target, choices](const Value& value) { target = value.choice(choices); };
  return {std::move(name), read, [&target] { return Json(target); }, {}, std::move(choices)};
}

Key path(std::string name, std::filesystem::path& target) {
  Key key = {
      std::move(name),
      [&target](const Value& value) { target = value.json() == "" ? "" : value.path_text(); },
      [&target] { return target.empty() ? Json() : Json(target.string()); }};
  key.names_paths = true;
  return key;
}

Json list_of(const std::vector<std::string>& texts) {
  Json list = Json::array();
  for (const std::string& one : texts) list.push_back(one);
  return list;
}

Key text_list(std::string name, std::vector<std::string>& target, std::string_view expected,
              const std::function<std::string(const Value&)>& read_one) {
  const auto read = [&target, expected, read_one](const Value& value) {
    target.clear();
    if (value.json().is_string()) {
      target.push_back(read_one(value));
      return;
    }
    for (const Value& item : value.elements(expected)) target.push_back(read_one(item));
  };
  return {std::move(name), read, [&target] { return list_of(target); }};
}

Key path_list(std::string name, std::vector<std::string>& target) {
  Key key = text_list(std::move(name), target, "a path or an array of paths",
                      [](const Value& value) { return value.path_text(); });
  key.names_paths = true;
  return key;
}

void list_keys(const Section& section, const std::string& prefix, std::vector<KeyInfo>& list) {
  for (const Key& key : section) {
    if (!key.listed) continue;
    const std::string path = prefix.empty() ? key.name : prefix + "." + key.name;
    const bool is_section = key.inner != nullptr;
    if (!is_section || key.effects) {
      expects(key.effects.has_value(), "config: a key must be a row()");
      const KeyDocumentation<std::string> text = {std::string(key.text.meaning),
                                                  std::string(key.text.initial),
                                                  std::string(key.text.range)};
      list.push_back(
          {path, key.values, key.other_names, key.names_paths, is_section, *key.effects, text});
    }
    if (is_section) list_keys(key.inner(), path, list);
  }
}

Key row(KeyEffects effects, Key key, KeyText text) {
  key.effects = effects;
  key.text = text;
  return key;
}

Section joined(const std::vector<Section>& parts) {
  Section all;
  for (const Section& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

Key accepted_only(Key key) {
  key.write = nullptr;
  return key;
}

Key with_values(Key key, std::vector<std::string> values) {
  key.values = std::move(values);
  return key;
}

Key also_called(Key key, std::vector<std::string> other_names) {
  key.other_names = std::move(other_names);
  return key;
}

}  // namespace ballast::config
