#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace ballast::tools {

/// A documented key, as text without Markdown.
struct KeyPage {
  std::string path;  ///< "optimizer.params.lr"
  std::string meaning;
  std::string initial;  ///< the default, or where it comes from; may be ""
  std::string range;    ///< accepted values; may be ""
};

/// All documented keys, in the order of a printed config.
std::vector<KeyPage> key_pages();

/// Returns the rows of a table of keys in configs/README.md, in Markdown: those of the keys in each
/// of `sections`, in that order. "top" are the keys in no section.
std::string key_table(const std::vector<std::string>& sections);

/// Returns the page of `ballast config-keys`: path, meaning, default and range of the keys that
/// have all of `words` in their paths or, if there is no such key, in their descriptions. Case does
/// not matter. Lines have at most `width` columns. Throws Error(usage) if no key matches.
std::string config_keys_page(const std::vector<std::string>& words, std::size_t width);

}  // namespace ballast::tools
