#include <algorithm>
#include <array>
#include <cctype>

#include <fmt/format.h>

#include "ballast/text/json.h"

namespace ballast::text {
namespace {

struct Spelling {
  std::string_view written;
  std::string_view advice;
};

/// Spellings of other languages and editors, by the beginning of the mistake in JSON.
constexpr auto kSpellings = std::to_array<Spelling>({
    {"True", "True: write true"},
    {"False", "False: write false"},
    {"None", "None: write null"},
    {"TRUE", "TRUE: write true"},
    {"FALSE", "FALSE: write false"},
    {"NULL", "NULL: write null"},
    {"'", "strings have double quotes (\")"},
    {"\xe2\x80\x9c", "a typographic quotation mark; write \""},
    {"\xe2\x80\x9d", "a typographic quotation mark; write \""},
    {"\xe2\x80\x98", "a typographic quotation mark; write \""},
    {"\xc2\xa0", "a no-break space; write a plain space"},
    {"\xe2\x80\x8b", "a space without width; remove it"},
    {"#", "comments begin with //"},
    {"+", "a number has no +"},
    {".", "a number begins with a digit, such as 0.5"},
});

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

}  // namespace

std::string advice_on_mistake(std::string_view text, std::size_t at) {
  if (at >= text.size()) return "";
  // The parser stops inside a token of several bytes.
  std::size_t begin = at;
  const auto part = [](char c) { return (c & 0x80) != 0 || c == '_' || std::isalnum(c) != 0; };
  while (begin > 0 && part(text[begin]) && part(text[begin - 1])) --begin;
  const std::string_view token = text.substr(begin);
  for (const Spelling& one : kSpellings) {
    if (token.starts_with(one.written)) return std::string(one.advice);
  }
  const bool in_number = at > 0 && is_digit(text[at - 1]);
  const bool zero_first = token.size() > 1 && token[0] == '0' && is_digit(token[1]);
  if (in_number && (zero_first || text[at] == '_' || text[at] == 'x')) {
    return "a number has neither leading zeros nor separators; write 1000, 0.01 or 1e-4";
  }
  if (begin > 1 && is_digit(text[at]) && text[begin - 1] == ',' && is_digit(text[begin - 2])) {
    return "a number has a point, not a comma: 0.01; a list has brackets";
  }
  if (text[at] == '\n') return "the string on this line has no closing quotation mark";
  const std::size_t before = text.substr(0, begin).find_last_not_of(" \t\r\n");
  const bool name = std::isalpha(static_cast<unsigned char>(token[0])) != 0;
  if (name && before != std::string_view::npos && (text[before] == '{' || text[before] == ',')) {
    const std::string_view word = token.substr(0, token.find_first_of(" \t\r\n:,"));
    const auto is_control = [](char c) {
      return static_cast<unsigned char>(c) < 0x20 || c == 0x7F;
    };
    if (word.size() > 40 || std::any_of(word.begin(), word.end(), is_control)) {
      return "names have double quotes";
    }
    return fmt::format("names have double quotes: \"{}\"", word);
  }
  return "";
}

}  // namespace ballast::text
