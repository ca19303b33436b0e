#pragma once

#include <span>
#include <string>
#include <string_view>

namespace ballast {

/// Returns the candidate nearest to `word` by Damerau-Levenshtein distance, ignoring case; "" if
/// every distance is above max(2, a third of the word's length) or above half of the longer word.
std::string nearest(std::string_view word, std::span<const std::string> candidates);

/// Returns " (did you mean 'x'?)" or "".
std::string did_you_mean(std::string_view word, std::span<const std::string> candidates);

/// Returns "a, b, c".
std::string listed(std::span<const std::string> words);

}  // namespace ballast
