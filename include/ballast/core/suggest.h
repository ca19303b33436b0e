#pragma once

#include <span>
#include <string>
#include <string_view>

namespace ballast {

/// The candidate nearest to `word` by Damerau-Levenshtein distance, or "" when none is near enough
/// to be what was meant (distance above a third of the word, at least 2).
std::string nearest(std::string_view word, std::span<const std::string> candidates);

/// " (did you mean 'x'?)" or "".
std::string did_you_mean(std::string_view word, std::span<const std::string> candidates);

}  // namespace ballast
