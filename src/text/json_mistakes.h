#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ballast::text {

/// What to write instead of the token at byte `at`, at which a parser of JSON stopped; "" if that
/// is not known.
std::string advice_on_mistake(std::string_view text, std::size_t at);

}  // namespace ballast::text
