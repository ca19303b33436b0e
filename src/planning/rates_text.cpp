#include "src/planning/rates_text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "ballast/core/error.h"

namespace ballast::planning {
namespace {

using Json = nlohmann::ordered_json;

/// Fit for a message of one line.
std::string printable(std::string_view text) {
  constexpr std::size_t kLongest = 120;
  std::string result;
  for (const char c : text.substr(0, kLongest)) {
    result += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
  }
  return text.size() > kLongest ? result + "..." : result;
}

/// Builds the tree from the parser's events.
class TreeBuilder final : public nlohmann::json_sax<Json> {
 public:
  explicit TreeBuilder(const std::string& name) : name_(name) {}

  bool null() override { return add({}); }
  bool boolean(bool value) override {
    return add({RatesValue::Type::flag, value ? "true" : "false", {}, {}});
  }
  bool number_integer(std::int64_t value) override { return add_number(std::to_string(value)); }
  bool number_unsigned(std::uint64_t value) override { return add_number(std::to_string(value)); }
  bool number_float(double /*value*/, const std::string& digits) override {
    return add_number(digits);
  }
  bool string(std::string& value) override {
    return add({RatesValue::Type::text, std::move(value), {}, {}});
  }
  bool binary(Json::binary_t& /*value*/) override { return false; }
  bool start_object(std::size_t /*size*/) override {
    return open({RatesValue::Type::object, "", {}, {}});
  }
  bool start_array(std::size_t /*size*/) override {
    return open({RatesValue::Type::array, "", {}, {}});
  }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(std::string& value) override {
    auto& keys = open_.back()->keys;
    if (std::find(keys.begin(), keys.end(), value) != keys.end()) {
      fail(fmt::format("{}: given twice", printable(value)));
    }
    keys.push_back(value);
    return true;
  }

  bool parse_error(std::size_t /*at*/, const std::string& /*token*/,
                   const nlohmann::detail::exception& error) override {
    // The library says "[json...] parse error at line 3, column 4: REASON".
    std::string_view reason = error.what();
    if (const auto bracket = reason.find("] "); bracket != std::string_view::npos) {
      reason.remove_prefix(bracket + 2);
    }
    fail(fmt::format("not valid JSON: {}", printable(reason)));
  }

  RatesValue take() {
    if (root_.type != RatesValue::Type::object) {
      fail(fmt::format("expected an object of rates, got {}", root_.described()));
    }
    return std::move(root_);
  }

 private:
  static constexpr std::size_t kDeepest = 8;

  [[noreturn]] void fail(const std::string& message) const {
    throw Error(ErrorCategory::config, fmt::format("{}: {}", name_, message));
  }

  RatesValue* place(RatesValue value) {
    if (open_.empty()) return &(root_ = std::move(value));
    return &open_.back()->elements.emplace_back(std::move(value));
  }
  bool add(RatesValue value) {
    place(std::move(value));
    return true;
  }
  bool add_number(std::string digits) {
    return add({RatesValue::Type::number, std::move(digits), {}, {}});
  }
  bool open(RatesValue value) {
    if (open_.size() == kDeepest) fail("nested too deeply; that is no file of rates");
    open_.push_back(place(std::move(value)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  const std::string& name_;
  RatesValue root_;
  std::vector<RatesValue*> open_;  ///< the parents grow only at their ends while these are in use
};

std::string with_exponent(std::string_view mantissa, long exponent) {
  return fmt::format("{}e{}", mantissa, exponent);
}

}  // namespace

std::string RatesValue::described() const {
  switch (type) {
    case Type::none:
      return "null";
    case Type::text:
      return fmt::format("the string \"{}\"", printable(text));
    case Type::array:
      return "an array";
    case Type::object:
      return "an object";
    default:
      return printable(text);
  }
}

RatesValue parse_rates_text(const std::string& name, const std::string& text) {
  TreeBuilder builder(name);
  Json::sax_parse(text, &builder, Json::input_format_t::json, true, true);
  return builder.take();
}

double scaled_number(std::string_view digits, int power) {
  const auto mark = digits.find_first_of("eE");
  const std::string mantissa(digits.substr(0, mark));
  long exponent = 0;
  if (mark != std::string_view::npos) {
    exponent = std::strtol(std::string(digits.substr(mark + 1)).c_str(), nullptr, 10);
  }
  constexpr long kFar = 100'000;  // beyond any double
  const std::string shifted = with_exponent(mantissa, std::clamp(exponent, -kFar, kFar) + power);
  double value = 0.0;
  const auto error = std::from_chars(shifted.data(), shifted.data() + shifted.size(), value).ec;
  if (error == std::errc::result_out_of_range) return std::strtod(shifted.c_str(), nullptr);
  return value;
}

std::string scaled_digits(double value, int power) {
  expects(std::isfinite(value), "rates: a number that is not finite cannot be written");
  if (value == 0.0) return "0";
  std::array<char, 40> buffer{};
  const auto result = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value,
                                    std::chars_format::scientific);
  const std::string_view text(buffer.data(), static_cast<std::size_t>(result.ptr - buffer.data()));
  const auto mark = text.find('e');
  const long exponent = std::strtol(std::string(text.substr(mark + 1)).c_str(), nullptr, 10);
  const std::string_view mantissa = text.substr(0, mark);
  const long shifted = exponent - power;
  constexpr long kSmallest = -5;
  constexpr long kLargest = 15;
  if (shifted < kSmallest || shifted > kLargest) return with_exponent(mantissa, shifted);
  std::string sign;
  std::string digits;
  for (const char c : mantissa) {
    if (c == '-') sign = c;
    if (c >= '0' && c <= '9') digits += c;
  }
  if (shifted < 0) {
    return sign + "0." + std::string(static_cast<std::size_t>(-shifted - 1), '0') + digits;
  }
  const auto whole = static_cast<std::size_t>(shifted) + 1;
  if (digits.size() <= whole) return sign + digits + std::string(whole - digits.size(), '0');
  return sign + digits.substr(0, whole) + "." + digits.substr(whole);
}

}  // namespace ballast::planning
