#pragma once

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>

#include "ballast/text/json.h"

namespace ballast::config {

using text::Json;
using text::printable;

/// Returns the whole path of a key that an override names, or calls `refuse` with the reason, which
/// throws.
using PathRule = std::function<std::string(const std::string& path,
                                           const std::function<void(const std::string&)>& refuse)>;

/// A config file as a JSON tree with overrides applied, and the context of its error messages.
class Document {
 public:
  /// Throws Error(config), one line that starts with `name`, for text that is not UTF-8, not JSON
  /// (comments are allowed), repeats a key in one object or is not an object, and for an override
  /// that is not path=value or whose path leads through a value that is not an object.
  Document(const std::string& text, const std::filesystem::path& base, const std::string& name,
           std::span<const std::string> overrides, const PathRule& whole_path = {});

  [[nodiscard]] Json& root() { return root_; }
  [[nodiscard]] const Json& root() const { return root_; }
  /// The absolute directory of relative paths.
  [[nodiscard]] const std::filesystem::path& base() const { return base_; }
  /// Replaces the section `name`. Errors about its keys name `origin`, except for keys that the
  /// section had before.
  void replace_section(const std::string& name, Json section, const std::string& origin);
  /// Returns whether replace_section() has given the key at `path` its value.
  [[nodiscard]] bool is_replaced(const std::string& path) const { return replaced_.contains(path); }
  /// Returns whether an override has made the section or value at `path`.
  [[nodiscard]] bool is_set(const std::string& path) const { return origins_.contains(path); }
  /// Throws Error(config) "NAME: PATH: MESSAGE", with the override or other origin of the value, if
  /// any.
  [[noreturn]] void fail(const std::string& path, const std::string& message) const;

 private:
  void apply(const std::string& assignment, const PathRule& whole_path);

  std::string name_;
  std::filesystem::path base_;
  Json root_;
  std::map<std::string, std::string> origins_;  ///< origin by path: "--set a=b"
  std::set<std::string> replaced_;
};

/// The member at "a.b", which is member b of the object a; nullptr if it or an object on the way is
/// missing.
inline text::Json* find_path(text::Json& object, std::string_view path) {
  const std::size_t dot = path.find('.');
  text::Json* const found = object.find(path.substr(0, dot));
  if (found == nullptr || dot == std::string_view::npos) return found;
  return find_path(*found, path.substr(dot + 1));
}
inline const text::Json* find_path(const text::Json& object, std::string_view path) {
  return find_path(const_cast<text::Json&>(object), path);
}

/// Like find_path(), but nullptr also for null.
inline const text::Json* find_given(const text::Json& object, std::string_view path) {
  const text::Json* const found = find_path(object, path);
  return found == nullptr || found->is_null() ? nullptr : found;
}

/// Whether two values are equal: numbers by value, objects with members in any order, others by
/// their text.
inline bool are_equal(const text::Json& one, const text::Json& other) {
  if (one.is_number() && other.is_number()) return one.number() == other.number();
  if (one.is_array() && other.is_array()) {
    return std::equal(one.elements().begin(), one.elements().end(), other.elements().begin(),
                      other.elements().end(), are_equal);
  }
  if (!one.is_object() || !other.is_object()) return one.compact() == other.compact();
  return one.members().size() == other.members().size() &&
         std::all_of(one.members().begin(), one.members().end(), [&other](const auto& member) {
           const text::Json* const found = other.find(member.key);
           return found != nullptr && are_equal(member.value, *found);
         });
}

}  // namespace ballast::config
