#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>

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

}  // namespace ballast::config
