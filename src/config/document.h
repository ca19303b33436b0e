#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace ballast::config {

/// Keeps the order of the file, so that messages name the first mistake and print() has a fixed
/// order.
using Json = nlohmann::ordered_json;

/// `text` fit for a message: control characters escaped, cut after about `limit` bytes.
std::string printable(std::string_view text, std::size_t limit = 120);

/// What stands in a config, for "got ...": `the string "eight"`, `-3`, `an array`.
std::string describe(const Json& json);

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
