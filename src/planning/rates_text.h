#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace ballast::planning {

/// A value of a JSON text. Numbers keep their digits, so that none are lost to a change of unit.
struct RatesValue {
  enum class Type { none, flag, number, text, array, object };
  Type type = Type::none;
  std::string text;                  ///< of a string; the digits of a number
  std::vector<std::string> keys;     ///< of an object, in the order of the text
  std::vector<RatesValue> elements;  ///< of an array, or of an object by key

  /// "the string \"fast\"", "-3", "an array": for "got ...".
  [[nodiscard]] std::string described() const;
};

/// The object that `text` (JSON, comments allowed) holds. Throws Error(config), one line that
/// starts with `name`, for anything else, and for a key that is given twice.
RatesValue parse_rates_text(const std::string& name, const std::string& text);

/// The double nearest to `digits` (a JSON number) times 10^`power`; infinite when it is too large.
double scaled_number(std::string_view digits, int power);

/// The shortest number that scaled_number(..., `power`) reads as `value` (finite), bit for bit.
std::string scaled_digits(double value, int power);

}  // namespace ballast::planning
