#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>

#include "ballast/text/json.h"

namespace ballast::config {

using text::Json;
using text::printable;

/// A config file as a JSON tree with overrides applied, and the context of its error messages.
class Document {
 public:
  /// Throws Error(config), one line that starts with `name`, for text that is not UTF-8, not JSON
  /// (comments are allowed), repeats a key in one object or is not an object, and for an override
  /// that is not path=value or whose path leads through a value that is not an object.
  Document(const std::string& text, const std::filesystem::path& base, const std::string& name,
           std::span<const std::string> overrides);

  [[nodiscard]] Json& root() { return root_; }
  [[nodiscard]] const Json& root() const { return root_; }
  /// The absolute directory of relative paths.
  [[nodiscard]] const std::filesystem::path& base() const { return base_; }
  /// Replaces the section `name`. Errors about its keys name `origin`, except for keys that the
  /// section had before.
  void replace_section(const std::string& name, Json section, const std::string& origin);
  /// Throws Error(config) "NAME: PATH: MESSAGE", with the override or other origin of the value, if
  /// any.
  [[noreturn]] void fail(const std::string& path, const std::string& message) const;

 private:
  void apply(const std::string& assignment);

  std::string name_;
  std::filesystem::path base_;
  Json root_;
  std::map<std::string, std::string> origins_;  ///< origin by path: "--set a=b"
};

}  // namespace ballast::config
