#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ballast::text {

/// The correct spelling of the token at byte `at`, at which a parser of JSON stopped; "" if it is
/// not known.
std::string advice_on_mistake(std::string_view text, std::size_t at);

}  // namespace ballast::text
