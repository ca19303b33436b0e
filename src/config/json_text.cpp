#include "src/config/json_text.h"

#include <algorithm>

#include "ballast/core/error.h"

#include "src/config/document.h"

namespace ballast::config {
namespace {

/// Behind the string whose opening quote is at `at`.
std::size_t skip_string(std::string_view text, std::size_t at) {
  for (++at; at < text.size() && text[at] != '"'; ++at) {
    if (text[at] == '\\') ++at;
  }
  return at + 1;
}

/// Behind the value that starts at `at`.
std::size_t skip_value(std::string_view text, std::size_t at) {
  if (text[at] == '"') return skip_string(text, at);
  if (text[at] != '{' && text[at] != '[') {
    return std::min(text.find_first_of(",]}/ \t\r\n", at), text.size());
  }
  std::size_t depth = 0;
  while (at < text.size()) {
    const char c = text[at];
    if (c == '"') {
      at = skip_string(text, at);
    } else if (c == '/') {
      at = skip_trivia(text, at);
    } else {
      ++at;
      if (c == '{' || c == '[') ++depth;
      if ((c == '}' || c == ']') && --depth == 0) break;
    }
  }
  return at;
}

}  // namespace

std::size_t skip_trivia(std::string_view text, std::size_t at) {
  while (at < text.size()) {
    if (text.substr(at, 2) == "//") {
      at = std::min(text.find('\n', at), text.size());
    } else if (text.substr(at, 2) == "/*") {
      const std::size_t close = text.find("*/", at + 2);
      at = close == std::string_view::npos ? text.size() : close + 2;
    } else if (text[at] == ' ' || text[at] == '\t' || text[at] == '\r' || text[at] == '\n') {
      ++at;
    } else {
      break;
    }
  }
  return at;
}

ObjectSpan find_object(std::string_view text, std::size_t at) {
  const auto expect = [&](std::size_t place, char c) {
    expects(place < text.size() && text[place] == c, "find_object wants valid JSON");
  };
  expect(at, '{');
  ObjectSpan object{{at, at}, {}};
  at = skip_trivia(text, at + 1);
  while (at < text.size() && text[at] != '}') {
    expect(at, '"');
    MemberSpan member;
    member.name = {at, skip_string(text, at)};
    member.key = Json::parse(text.substr(at, member.name.end - at)).get<std::string>();
    at = skip_trivia(text, member.name.end);
    expect(at, ':');
    at = skip_trivia(text, at + 1);
    expects(at < text.size(), "find_object wants valid JSON");
    member.value = {at, skip_value(text, at)};
    at = skip_trivia(text, member.value.end);
    if (at < text.size() && text[at] == ',') at = skip_trivia(text, at + 1);
    object.members.push_back(std::move(member));
  }
  expect(at, '}');
  object.braces.end = at + 1;
  return object;
}

}  // namespace ballast::config
