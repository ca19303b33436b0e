#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <vector>

namespace ballast::text {

/// The words of a list that is written with single spaces between them: "model.* data.text".
inline std::vector<std::string_view> words_of(std::string_view list) {
  std::vector<std::string_view> words;
  for (std::size_t at = 0; at < list.size();) {
    const std::size_t end = std::min(list.find(' ', at), list.size());
    words.push_back(list.substr(at, end - at));
    at = end + 1;
  }
  return words;
}

/// Whether `word` is in such a list.
inline bool has_word(std::string_view list, std::string_view word) {
  const auto words = words_of(list);
  return std::find(words.begin(), words.end(), word) != words.end();
}

}  // namespace ballast::text
