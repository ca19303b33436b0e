#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/error.h"

namespace ballast::text {

/// A JSON value, built for writing or read by parse_json. Members keep their order. Numbers keep
/// their digits, so reading and writing them loses no precision.
class Json {
 public:
  enum class Type { null, boolean, number, string, array, object };
  struct Member;

  Json();
  Json(const Json& other);
  Json(Json&& other) noexcept;
  Json& operator=(const Json& other);
  Json& operator=(Json&& other) noexcept;
  ~Json();
  Json(bool value) : Json(Type::boolean, value ? "true" : "false") {}
  template <std::integral T>
  Json(T value) : Json(Type::number, std::to_string(value)) {}
  /// The shortest digits that read back as `value`, bit for bit. NaN and infinities become null.
  Json(double value);
  Json(std::string value) : Json(Type::string, std::move(value)) {}
  Json(std::string_view value) : Json(std::string(value)) {}
  Json(const char* value) : Json(std::string(value)) {}

  static Json array(std::initializer_list<Json> elements = {});
  static Json object(std::initializer_list<Member> members = {});
  /// A number of these digits, which must be a JSON number.
  static Json number_of(std::string digits) { return {Type::number, std::move(digits)}; }

  [[nodiscard]] Type type() const { return type_; }
  [[nodiscard]] bool is_null() const { return type_ == Type::null; }
  [[nodiscard]] bool is_boolean() const { return type_ == Type::boolean; }
  [[nodiscard]] bool is_number() const { return type_ == Type::number; }
  [[nodiscard]] bool is_string() const { return type_ == Type::string; }
  [[nodiscard]] bool is_array() const { return type_ == Type::array; }
  [[nodiscard]] bool is_object() const { return type_ == Type::object; }
  /// Whether the value is a string equal to `text`.
  friend bool operator==(const Json& json, std::string_view text) {
    return json.is_string() && json.text_ == text;
  }

  /// The characters of a string, the digits of a number, "true" or "false".
  [[nodiscard]] const std::string& text() const { return text_; }
  [[nodiscard]] bool flag() const { return text_ == "true"; }
  /// The double nearest to a number. It may be infinite or NaN only with JsonRules::non_finite.
  [[nodiscard]] double number() const;
  /// The value of a number without sign, fraction or exponent that fits; otherwise empty.
  [[nodiscard]] std::optional<std::uint64_t> whole() const;

  [[nodiscard]] const std::vector<Json>& elements() const { return elements_; }
  [[nodiscard]] const std::vector<Member>& members() const { return members_; }
  /// The member `key` of an object; nullptr if it is missing or this is not an object.
  [[nodiscard]] const Json* find(std::string_view key) const;
  [[nodiscard]] Json* find(std::string_view key);
  /// The member `key`, added if it is missing. Null becomes an object.
  Json& operator[](std::string_view key);
  bool erase(std::string_view key);
  /// Adds a member without checking whether the key exists.
  void add(std::string key, Json value);
  /// Appends an element. Null becomes an array.
  void push_back(Json element);

  /// Byte offsets of a parsed value in its text.
  [[nodiscard]] std::size_t begin_at() const { return begin_; }
  [[nodiscard]] std::size_t end_at() const { return end_; }

  /// Description for "got ...": `the string "eight"`, `-3`, `an array`.
  [[nodiscard]] std::string described() const;

  /// The value in one line without white space. Bytes that are not UTF-8 are replaced by U+FFFD.
  [[nodiscard]] std::string compact() const;
  /// The outer `levels` levels on several lines, indented by two spaces each; the rest on one line.
  [[nodiscard]] std::string pretty(unsigned levels = std::numeric_limits<unsigned>::max()) const;

 private:
  friend class TreeBuilder;

  Json(Type type, std::string text);
  void write(std::string& out, unsigned levels, bool spaced, std::size_t indent) const;

  Type type_ = Type::null;
  std::string text_;
  std::vector<Json> elements_;
  std::vector<Member> members_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
};

struct Json::Member {
  std::string key;
  Json value;
  std::size_t at = 0;  ///< byte offset of the key in the text
};

struct JsonRules {
  ErrorCategory category = ErrorCategory::config;  ///< category of the errors
  bool comments = false;
  /// Also reads NaN, Infinity and -Infinity, which Python's json module writes, as numbers.
  bool non_finite = false;
  bool repeated = false;     ///< accepts a key given twice in one object; find() returns the first
  std::size_t deepest = 32;  ///< maximum nesting of arrays and objects
};

/// Parses `text`. Throws Error, one line that starts with `name`, for text that is
/// not UTF-8 or not JSON (with line and column), for a key given twice in one object and for deeper
/// nesting.
Json parse_json(std::string_view text, const std::string& name, const JsonRules& rules = {});

/// Calls `visit` for each value in `object` that is not an object with members, in order, with the
/// keys that lead to it: "zero_optimization.stage".
void for_each_value(const Json& object,
                    const std::function<void(const std::string& path, const Json& value)>& visit);

/// Whether `text` is JSON, without comments.
bool is_json(std::string_view text);

/// The first byte that is not UTF-8 (RFC 3629), or npos.
std::size_t find_not_utf8(std::string_view text);

/// Prepares `text` for a message: escapes control characters and cuts it off after about `limit`
/// bytes.
std::string printable(std::string_view text, std::size_t limit = 120);

/// The double nearest to `digits` (a JSON number) times 10^`power`; infinite if it is too large.
double scaled_number(std::string_view digits, int power);

/// The shortest number that scaled_number(..., `power`) reads as `value` (finite), bit for bit.
Json scaled_json(double value, int power);

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

/// The correct spelling of the token at byte `at`, at which a parser of JSON stopped; "" if it is
/// not known.
std::string advice_on_mistake(std::string_view text, std::size_t at);

}  // namespace ballast::text
