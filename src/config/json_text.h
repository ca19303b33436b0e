#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace ballast::config {

/// A range of a text.
struct Span {
  std::size_t begin = 0;
  std::size_t end = 0;
};

/// Where a member of an object stands.
struct MemberSpan {
  std::string key;  ///< escapes resolved
  Span name;        ///< the key with its quotes
  Span value;
};

/// Where an object stands, and its members in order.
struct ObjectSpan {
  Span braces;  ///< from the opening to behind the closing one
  std::vector<MemberSpan> members;
};

/// Behind the white space and comments from `at` on.
std::size_t skip_trivia(std::string_view text, std::size_t at);

/// The object that starts at `at` of valid JSON with comments.
ObjectSpan find_object(std::string_view text, std::size_t at);

}  // namespace ballast::config
