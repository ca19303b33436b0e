#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>

#include "ballast/text/json.h"

namespace ballast::config {

using text::Json;
using text::printable;

/// A config file as a tree, overrides applied, together with what messages about it need.
class Document {
 public:
  /// Throws Error(config), one line that starts with `name`, for text that is not UTF-8, not JSON
  /// (comments apart), has a key twice in one object or is no object, and for an override that is
  /// not path=value or whose path leads through something that is no object.
  Document(const std::string& text, const std::filesystem::path& base, const std::string& name,
           std::span<const std::string> overrides);

  [[nodiscard]] Json& root() { return root_; }
  [[nodiscard]] const Json& root() const { return root_; }
  /// The absolute directory of relative paths.
  [[nodiscard]] const std::filesystem::path& base() const { return base_; }
  /// Throws Error(config) "NAME: PATH: MESSAGE"; says so when an override set the value at `path`.
  [[noreturn]] void fail(const std::string& path, const std::string& message) const;

 private:
  void apply(const std::string& assignment);

  std::string name_;
  std::filesystem::path base_;
  Json root_;
  std::map<std::string, std::string> origins_;  ///< path: the override that put something there
};

}  // namespace ballast::config
