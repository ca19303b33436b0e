#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "ballast/config/choices.h"
#include "ballast/config/key_effects.h"

#include "src/config/config_tree.h"

namespace ballast::config {

/// Inclusive bounds of a whole number. The default upper bound avoids overflow in sums of products.
struct WholeRange {
  std::uint64_t low = 0;
  std::uint64_t high = std::uint64_t{1} << 53U;
};

/// Bounds of a number; `open_*` excludes the bound itself.
struct RealRange {
  double low = 0.0;
  double high = std::numeric_limits<double>::max();
  bool open_low = false;
  bool open_high = false;
};

constexpr WholeRange kSteps = {0, std::uint64_t{1} << 40U};
constexpr RealRange kPositive = {.low = 0.0, .open_low = true};
constexpr RealRange kNotNegative = {.low = 0.0};
constexpr RealRange kSeconds = {.low = 0.0, .high = 1e6, .open_low = true};
constexpr RealRange kShare = {.low = 0.0, .high = 1.0};
constexpr RealRange kBelowOne = {.low = 0.0, .high = 1.0, .open_high = true};

/// One value of the document and its path. Each reader throws Error(config), naming the path and
/// the value, for a wrong type or a value out of range.
class Value {
 public:
  Value(const Document& document, const Json& json, std::string path)
      : document_(&document), json_(&json), path_(std::move(path)) {}

  [[nodiscard]] const Json& json() const { return *json_; }
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] Value member(const std::string& name) const;
  [[nodiscard]] Value element(std::size_t index) const;
  /// The elements of an array. `expected` is for the error if it is another value.
  [[nodiscard]] std::vector<Value> elements(std::string_view expected) const;
  /// Another value at the same path; refers to `json`.
  [[nodiscard]] Value with(const Json& json) const { return {*document_, json, path_}; }
  [[nodiscard]] bool is_auto() const { return *json_ == "auto"; }

  [[nodiscard]] bool flag() const;
  [[nodiscard]] std::uint64_t whole(WholeRange range) const;
  [[nodiscard]] double real(RealRange range) const;
  /// Reads a number of bytes or a string with a unit.
  [[nodiscard]] std::uint64_t bytes(WholeRange range) const;
  [[nodiscard]] std::string text() const;
  /// Reads one of `choices`. The error for other values suggests the nearest one.
  [[nodiscard]] std::string choice(const std::vector<std::string>& choices) const;
  /// Reads a path and makes it absolute; globs are kept.
  [[nodiscard]] std::string path_text() const;

  [[noreturn]] void fail(const std::string& message) const { document_->fail(path_, message); }
  /// "expected one of CHOICES, got ...", with a suggestion.
  [[noreturn]] void fail_choice(const std::vector<std::string>& choices) const;
  /// "expected EXPECTED, got ..."
  [[noreturn]] void fail_type(std::string_view expected) const;

 private:
  const Document* document_;
  const Json* json_;
  std::string path_;
};

/// One key of a section: its name and functions that read and write it. The functions refer to the
/// fields of one Config.
struct Key {
  std::string name;
  std::function<void(const Value&)> read;
  std::function<Json()> write;                ///< empty for a key that is accepted but not printed
  std::vector<std::string> other_names = {};  ///< names that are not accepted, only used to suggest
                                              ///< `name`
  std::vector<std::string> values = {};       ///< values of an enumeration, for completion
  bool names_paths = false;
  bool listed = true;                                 ///< whether key_list() has it
  std::function<std::vector<Key>()> inner = nullptr;  ///< keys of a nested section
  std::optional<KeyEffects> effects = {};             ///< row() sets it and `text`
  KeyText text = {};
};

using Section = std::vector<Key>;

/// Returns whether a member of this name is a comment, which is skipped: "_comment", "//".
bool is_comment(std::string_view name);

/// Reads the keys in the table's order. Missing keys and null keep the default. Throws
/// Error(config) for unknown keys that are no comments.
void read_section(const Value& value, const Section& section);
Json write_section(const Section& section);

/// Adds all rows of the section and of those in it, with `prefix` and a dot before their names.
void list_keys(const Section& section, const std::string& prefix, std::vector<KeyInfo>& list);

/// A nested section. `keys` is called when it is read or written, so it may depend on earlier keys
/// of the table.
Key section(std::string name, const std::function<Section()>& keys);

/// A section that `enabled: false` switches off. Its other keys then have no effect: invalid values
/// and unknown keys are noted in `log` instead of refused.
Key switched_section(std::string name, const std::function<Section()>& keys,
                     std::vector<std::string>& log);

template <typename T>
Key whole(std::string name, T& target, WholeRange range) {
  static_assert(std::is_integral_v<T>);
  return {std::move(name),
          [&target, range](const Value& value) { target = static_cast<T>(value.whole(range)); },
          [&target] { return Json(target); }};
}
Key real(std::string name, double& target, RealRange range);
Key flag(std::string name, bool& target);
Key bytes(std::string name, std::uint64_t& target, WholeRange range);
Key choice(std::string name, std::string& target, std::vector<std::string> choices);

/// The names of the closed choice T.
template <class T>
std::vector<std::string> choice_names() {
  std::vector<std::string> names;
  names.reserve(std::size(kChoices<T>));
  for (const auto& one : kChoices<T>) names.emplace_back(one.name);
  return names;
}
/// The closed choice T that `value` names.
template <class T>
T read_choice(const Value& value) {
  return *value_named<T>(value.choice(choice_names<T>()));
}
/// A closed choice: one of kChoices<T>.
template <class T>
Key choice(std::string name, T& target) {
  return {std::move(name),
          [&target](const Value& value) { target = read_choice<T>(value); },
          [&target] { return Json(name_of(target)); },
          {},
          choice_names<T>()};
}
/// A path; null and "" mean none.
Key path(std::string name, std::filesystem::path& target);
/// An array of strings.
Json list_of(const std::vector<std::string>& texts);
/// A key for a string or an array of strings, each read by `read_one`. `expected` is for errors.
Key text_list(std::string name, std::vector<std::string>& target, std::string_view expected,
              const std::function<std::string(const Value&)>& read_one);
/// A key for a path or glob, or an array of them.
Key path_list(std::string name, std::vector<std::string>& target);

/// Also accepts "auto", which sets `target` to zero (or empty).
template <typename T>
Key or_auto(Key key, T& target) {
  key.read = [read = std::move(key.read), &target](const Value& value) {
    if (value.is_auto()) {
      target = T{};
    } else {
      read(value);
    }
  };
  key.write = [write = std::move(key.write), &target] {
    return target == T{} ? Json("auto") : write();
  };
  return key;
}

/// A key whose value may be missing. A missing value is written as `missing`, which is "auto" or
/// null, and "auto" is read as missing if `missing` is "auto". `read_one` reads other values.
template <class T>
Key optional_key(std::string name, std::optional<T>& target, const Json& missing,
                 const std::function<T(const Value&)>& read_one) {
  return {std::move(name),
          [&target, read_one, missing](const Value& value) {
            target.reset();
            if (!value.is_auto() || missing.is_null()) target = read_one(value);
          },
          [&target, missing] { return target ? Json(*target) : missing; }};
}

/// A row of the table of all keys. Sections pass their effects to keys of other versions, and have
/// a text if they can be given as a whole.
Key row(KeyEffects effects, Key key, KeyText text);

/// The keys of all `parts` in one section.
Section joined(const std::vector<Section>& parts);

/// Like `key`, but not printed.
Key accepted_only(Key key);

/// Adds the accepted values of a key, for completion. A key that is read by choice() has them
/// already.
Key with_values(Key key, std::vector<std::string> values);

/// Adds names that other programs use for a key.
Key also_called(Key key, std::vector<std::string> other_names);

}  // namespace ballast::config
