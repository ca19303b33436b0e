#include "ballast/text/json.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace ballast::text {
namespace {

using Library = nlohmann::json;

constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

std::string in_quotes(std::string_view text) {
  return Library(text).dump(-1, ' ', false, Library::error_handler_t::replace);
}

/// Length in bytes of the well-formed UTF-8 character at `at` (RFC 3629), or 0.
std::size_t utf8_length(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U;
  };
  const unsigned lead = byte(at);
  if (lead < 0x80) return 1;
  const std::size_t length = lead < 0xC2   ? 0
                             : lead < 0xE0 ? 2
                             : lead < 0xF0 ? 3
                             : lead < 0xF5 ? 4
                                           : 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xC0U) != 0x80) return 0;
  }
  const unsigned second = byte(at + 1);
  const bool overlong = (lead == 0xE0 && second < 0xA0) || (lead == 0xF0 && second < 0x90);
  const bool outside = (lead == 0xED && second > 0x9F) || (lead == 0xF4 && second > 0x8F);
  return overlong || outside ? 0 : length;
}

/// "NAME:LINE:COLUMN" of byte `at`, both from 1; columns count characters.
std::string position(const std::string& name, std::string_view text, std::size_t at) {
  const std::string_view before = text.substr(0, std::min(at, text.size()));
  const auto line = 1 + std::count(before.begin(), before.end(), '\n');
  const std::size_t start = before.rfind('\n') + 1;  // npos + 1 is 0
  const auto column = 1 + std::count_if(before.begin() + static_cast<std::ptrdiff_t>(start),
                                        before.end(), [](char c) { return (c & 0xC0) != 0x80; });
  return fmt::format("{}:{}:{}", name, line, column);
}

/// Start of the next token after white space, comments, commas and colons.
std::size_t next_token(std::string_view text, std::size_t at) {
  while (at < text.size()) {
    if (text.substr(at, 2) == "//") {
      at = std::min(text.find_first_of("\r\n", at), text.size());
    } else if (text.substr(at, 2) == "/*") {
      const std::size_t close = text.find("*/", at + 2);
      at = close == std::string_view::npos ? text.size() : close + 2;
    } else if (std::string_view(" \t\r\n,:").find(text[at]) != std::string_view::npos) {
      ++at;
    } else {
      break;
    }
  }
  return at;
}

/// End of the string, number or word that starts at `at` in valid JSON.
std::size_t scalar_end(std::string_view text, std::size_t at) {
  if (text[at] != '"') return std::min(text.find_first_of(",]}/ \t\r\n", at), text.size());
  for (++at; at < text.size() && text[at] != '"'; ++at) {
    if (text[at] == '\\') ++at;
  }
  return at + 1;
}

/// Replaces each value NaN, Infinity and -Infinity in `text` by a string of the same length, for a
/// library that does not read them.
std::string readable(std::string_view text) {
  std::string out(text);
  const std::size_t start = text.starts_with(kByteOrderMark) ? kByteOrderMark.size() : 0;
  for (std::size_t at = next_token(text, start); at < text.size(); at = next_token(text, at)) {
    if (std::string_view("{}[]").find(text[at]) != std::string_view::npos) {
      ++at;
      continue;
    }
    const std::size_t end = scalar_end(text, at);
    const std::string_view word = text.substr(at, end - at);
    if (word == "NaN" || word == "Infinity" || word == "-Infinity") {
      out[at] = '"';
      out[end - 1] = '"';
    }
    at = std::max(end, at + 1);
  }
  return out;
}

}  // namespace

/// Builds the tree from the library's events and records each value's position in the text. The
/// library's own builder keeps the last of two equal keys and drops the digits of numbers.
class TreeBuilder final : public nlohmann::json_sax<Library> {
 public:
  TreeBuilder(std::string_view text, const std::string& name, const JsonRules& rules)
      : text_(text),
        name_(name),
        rules_(rules),
        at_(text.starts_with(kByteOrderMark) ? kByteOrderMark.size() : 0) {}

  bool null() override { return add({}); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(std::int64_t /*value*/) override { return add_number(); }
  bool number_unsigned(std::uint64_t /*value*/) override { return add_number(); }
  bool number_float(double /*value*/, const std::string& /*digits*/) override {
    return add_number();
  }
  bool string(std::string& value) override {
    // A word that readable() has replaced by a string.
    if (text_[next_token(text_, at_)] != '"') return add_number();
    return add(std::move(value));
  }
  bool binary(Library::binary_t& /*value*/) override { return false; }
  bool start_object(std::size_t /*size*/) override { return open(Json::object()); }
  bool end_object() override { return close(); }
  bool start_array(std::size_t /*size*/) override { return open(Json::array()); }
  bool end_array() override { return close(); }

  bool key(std::string& value) override {
    auto& [node, keys] = open_.back();
    const bool added = keys.insert(value).second;
    const std::size_t at = next_token(text_, at_);
    at_ = scalar_end(text_, at);
    node->members_.push_back({std::move(value), {}, at});
    if (!added && !rules_.repeated) fail(fmt::format("{}: {}: given twice", name_, path()));
    return true;
  }

  bool parse_error(std::size_t end, const std::string& /*token*/,
                   const nlohmann::detail::exception& error) override {
    // The library says "[json...] parse error at ...: syntax error while parsing X - REASON".
    std::string_view reason = error.what();
    if (const auto dash = reason.find(" - "); dash != std::string_view::npos) {
      reason.remove_prefix(dash + 3);
    } else if (const auto bracket = reason.find("] "); bracket != std::string_view::npos) {
      reason.remove_prefix(bracket + 2);
    }
    const std::size_t at = end == 0 ? 0 : end - 1;
    const std::string place = position(name_, text_, at);
    const std::string advice = advice_on_mistake(text_, at);
    if (!advice.empty()) fail(fmt::format("{}: not valid JSON: {}", place, advice));
    fail(fmt::format("{}: not valid JSON: {}{}", place, printable(reason, 200),
                     reason.ends_with("expected ':'") ? "" : cause(at)));
  }

  [[noreturn]] void fail(const std::string& message) const {
    throw Error(rules_.category, message);
  }
  Json take() { return std::move(root_); }

 private:
  struct Frame {
    Json* node = nullptr;
    std::unordered_set<std::string> keys;
  };

  Json& place(Json value, std::size_t begin) {
    value.begin_ = begin;
    if (open_.empty()) return root_ = std::move(value);
    Json& parent = *open_.back().node;
    if (parent.is_array()) return parent.elements_.emplace_back(std::move(value));
    return parent.members_.back().value = std::move(value);
  }
  bool add(Json value) {
    const std::size_t begin = next_token(text_, at_);
    at_ = scalar_end(text_, begin);
    place(std::move(value), begin).end_ = at_;
    return true;
  }
  bool add_number() {
    const std::size_t begin = next_token(text_, at_);
    return add(Json::number_of(std::string(text_.substr(begin, scalar_end(text_, begin) - begin))));
  }
  bool open(Json value) {
    if (open_.size() == rules_.deepest) {
      fail(fmt::format("{}: nested deeper than {} levels", name_, rules_.deepest));
    }
    const std::size_t begin = next_token(text_, at_);
    at_ = begin + 1;
    // Only the innermost open value grows, so the addresses of the others stay valid.
    open_.push_back({&place(std::move(value), begin), {}});
    return true;
  }
  bool close() {
    at_ = next_token(text_, at_) + 1;
    open_.back().node->end_ = at_;
    open_.pop_back();
    return true;
  }
  [[nodiscard]] std::string path() const {
    std::string path;
    for (const auto& [node, keys] : open_) {
      if (node->is_array()) {
        path += fmt::format("[{}]", node->elements_.size() - 1);
      } else {
        path += (path.empty() ? "" : ".") + printable(node->members_.back().key);
      }
    }
    return path;
  }
  /// Returns the probable cause of a syntax error at byte `at`, between two values; "" if unknown.
  [[nodiscard]] std::string cause(std::size_t at) const {
    if (at >= text_.size()) {
      if (open_.empty()) return "";
      const Json& inner = *open_.back().node;
      return fmt::format(" (the {} of {} is not closed)", inner.is_array() ? '[' : '{',
                         position(name_, text_, inner.begin_));
    }
    const auto last = text_.substr(0, at).find_last_not_of(" \t\r\n");
    const char before = last == std::string_view::npos ? '\0' : text_[last];
    if (text_[at] == '}' || text_[at] == ']') {
      if (before == ',') return " (is there an extra comma before it?)";
      return open_.empty() ? " (is it one too many?)" : "";
    }
    if (open_.empty()) return root_.is_null() ? "" : " (the file has more than one value)";
    const bool ended = before != ',' && before != ':' && before != '{' && before != '[';
    return ended ? " (is a comma missing before it?)" : "";
  }

  std::string_view text_;
  const std::string& name_;
  JsonRules rules_;
  std::size_t at_;  ///< end of the last token
  Json root_;
  std::vector<Frame> open_;
};

Json::Json() = default;
Json::Json(const Json& other) = default;
Json::Json(Json&& other) noexcept = default;
Json& Json::operator=(const Json& other) = default;
Json& Json::operator=(Json&& other) noexcept = default;
Json::~Json() = default;

Json::Json(Type type, std::string text) : type_(type), text_(std::move(text)) {}

Json::Json(double value) {
  if (!std::isfinite(value)) return;
  type_ = Type::number;
  text_ = Library(value).dump();
}

Json Json::array(std::initializer_list<Json> elements) {
  Json json(Type::array, "");
  json.elements_ = elements;
  return json;
}

Json Json::object(std::initializer_list<Member> members) {
  Json json(Type::object, "");
  json.members_ = members;
  return json;
}

double Json::number() const {
  return scaled_number(text_, 0);
}

std::optional<std::uint64_t> Json::whole() const {
  std::uint64_t value = 0;
  const char* const end = text_.data() + text_.size();
  const auto result = std::from_chars(text_.data(), end, value);
  const bool fits = is_number() && result.ec == std::errc() && result.ptr == end;
  return fits ? std::optional(value) : std::nullopt;
}

const Json* Json::find(std::string_view key) const {
  const auto found = std::find_if(members_.begin(), members_.end(),
                                  [&](const Member& member) { return member.key == key; });
  return found == members_.end() ? nullptr : &found->value;
}

Json* Json::find(std::string_view key) {
  return const_cast<Json*>(std::as_const(*this).find(key));
}

Json& Json::operator[](std::string_view key) {
  if (is_null()) type_ = Type::object;
  expects(is_object(), "only a JSON object has members");
  if (Json* const found = find(key)) return *found;
  return members_.emplace_back(Member{std::string(key), {}}).value;
}

bool Json::erase(std::string_view key) {
  return std::erase_if(members_, [&](const Member& member) { return member.key == key; }) > 0;
}

void Json::add(std::string key, Json value) {
  members_.push_back({std::move(key), std::move(value)});
}

void Json::push_back(Json element) {
  if (is_null()) type_ = Type::array;
  expects(is_array(), "elements can be added only to a JSON array");
  elements_.push_back(std::move(element));
}

std::string Json::described() const {
  switch (type_) {
    case Type::null:
      return "null";
    case Type::string:
      return fmt::format("the string \"{}\"", printable(text_, 60));
    case Type::array:
      return "an array";
    case Type::object:
      return "an object";
    default:
      return printable(text_, 60);
  }
}

std::string Json::compact() const {
  std::string out;
  write(out, 0, false, 0);
  return out;
}

std::string Json::pretty(unsigned levels) const {
  std::string out;
  write(out, levels, true, 0);
  return out;
}

void Json::write(std::string& out, unsigned levels, bool spaced, std::size_t indent) const {
  if (!is_array() && !is_object()) {
    out += is_null() ? "null" : is_string() ? in_quotes(text_) : text_;
    return;
  }
  const std::size_t count = is_array() ? elements_.size() : members_.size();
  const bool broken = levels > 0 && count > 0;
  out += is_array() ? '[' : '{';
  for (std::size_t i = 0; i < count; ++i) {
    if (i > 0) out += spaced && !broken ? ", " : ",";
    if (broken) out.append("\n").append(indent + 2, ' ');
    if (is_object()) out.append(in_quotes(members_[i].key)).append(spaced ? ": " : ":");
    const Json& item = is_array() ? elements_[i] : members_[i].value;
    item.write(out, broken ? levels - 1 : 0, spaced, indent + 2);
  }
  if (broken) out.append("\n").append(indent, ' ');
  out += is_array() ? ']' : '}';
}

Json parse_json(std::string_view text, const std::string& name, const JsonRules& rules) {
  TreeBuilder builder(text, name, rules);
  if (const std::size_t bad = find_not_utf8(text); bad != std::string_view::npos) {
    builder.fail(fmt::format("{}: not UTF-8: found byte 0x{:02x}; {}", position(name, text, bad),
                             static_cast<unsigned char>(text[bad]),
                             rules.category == ErrorCategory::config
                                 ? "save the file as UTF-8"
                                 : "the file is damaged; download or restore it"));
  }
  if (rules.non_finite) {
    Library::sax_parse(readable(text), &builder, Library::input_format_t::json, true,
                       rules.comments);
  } else {
    Library::sax_parse(text, &builder, Library::input_format_t::json, true, rules.comments);
  }
  return builder.take();
}

void for_each_value(const Json& object,
                    const std::function<void(const std::string& path, const Json& value)>& visit) {
  for (const Json::Member& member : object.members()) {
    if (!member.value.is_object() || member.value.members().empty()) {
      visit(member.key, member.value);
      continue;
    }
    for_each_value(member.value, [&](const std::string& path, const Json& value) {
      visit(member.key + "." + path, value);
    });
  }
}

bool is_json(std::string_view text) {
  return Library::accept(text);
}

std::size_t find_not_utf8(std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = utf8_length(text, at);
    if (length == 0) return at;
    at += length;
  }
  return std::string_view::npos;
}

std::string printable(std::string_view text, std::size_t limit) {
  const bool cut = text.size() > limit;
  if (cut) {
    while (limit > 0 && (static_cast<unsigned char>(text[limit]) & 0xC0U) == 0x80) --limit;
    text = text.substr(0, limit);
  }
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    out += byte < 0x20 || byte == 0x7F ? fmt::format("\\u{:04x}", byte) : std::string(1, c);
  }
  return cut ? out + "..." : out;
}

double scaled_number(std::string_view digits, int power) {
  const auto mark = digits.find_first_of("eE");
  long exponent = 0;
  if (mark != std::string_view::npos) {
    exponent = std::strtol(std::string(digits.substr(mark + 1)).c_str(), nullptr, 10);
  }
  constexpr long kFar = 100'000;  // beyond any double
  const std::string shifted =
      fmt::format("{}e{}", digits.substr(0, mark), std::clamp(exponent, -kFar, kFar) + power);
  double value = 0.0;
  const auto error = std::from_chars(shifted.data(), shifted.data() + shifted.size(), value).ec;
  if (error == std::errc::result_out_of_range) return std::strtod(shifted.c_str(), nullptr);
  return value;
}

Json scaled_json(double value, int power) {
  expects(std::isfinite(value), "JSON cannot represent a number that is not finite");
  if (value == 0.0) return 0;
  std::array<char, 40> buffer{};
  const auto result = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value,
                                    std::chars_format::scientific);
  const std::string_view text(buffer.data(), static_cast<std::size_t>(result.ptr - buffer.data()));
  const auto mark = text.find('e');
  const std::string_view mantissa = text.substr(0, mark);
  const long shifted = std::strtol(std::string(text.substr(mark + 1)).c_str(), nullptr, 10) - power;
  constexpr long kSmallest = -5;
  constexpr long kLargest = 15;
  if (shifted < kSmallest || shifted > kLargest) {
    return Json::number_of(fmt::format("{}e{}", mantissa, shifted));
  }
  const std::string sign = value < 0.0 ? "-" : "";
  std::string digits;
  std::copy_if(mantissa.begin(), mantissa.end(), std::back_inserter(digits),
               [](char c) { return c >= '0' && c <= '9'; });
  if (shifted < 0) {
    digits.insert(0, "0." + std::string(static_cast<std::size_t>(-shifted - 1), '0'));
  } else if (const auto whole = static_cast<std::size_t>(shifted) + 1; digits.size() > whole) {
    digits.insert(whole, ".");
  } else {
    digits.append(whole - digits.size(), '0');
  }
  return Json::number_of(sign + digits);
}

}  // namespace ballast::text
