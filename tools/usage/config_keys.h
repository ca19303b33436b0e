#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ballast::tools {

/// One row of the tables of keys in configs/README.md, as text without Markdown.
struct KeyText {
  std::string_view path;  ///< "optimizer.params.lr"
  std::string_view meaning;
  std::string_view initial;  ///< the default, or where it comes from; may be ""
  std::string_view range;    ///< accepted values; may be ""
};

/// All rows, in the order of configs/README.md. The build generates them with embed_keys.py.
std::span<const KeyText> key_texts();

/// Returns the page of `ballast config-keys`: path, meaning, default and range of the keys that
/// have all of `words` in their paths or, if there is no such key, in their descriptions. Case does
/// not matter. Lines have at most `width` columns. Throws Error(usage) if no key matches.
std::string config_keys_page(const std::vector<std::string>& words, std::size_t width);

}  // namespace ballast::tools
