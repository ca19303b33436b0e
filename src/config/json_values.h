#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>

#include "ballast/text/json.h"

namespace ballast::config {

/// The member at "a.b", which is member b of the object a; nullptr if it or an object on the way is
/// missing.
inline text::Json* find_path(text::Json& object, std::string_view path) {
  const std::size_t dot = path.find('.');
  text::Json* const found = object.find(path.substr(0, dot));
  if (found == nullptr || dot == std::string_view::npos) return found;
  return find_path(*found, path.substr(dot + 1));
}
inline const text::Json* find_path(const text::Json& object, std::string_view path) {
  return find_path(const_cast<text::Json&>(object), path);
}

/// Like find_path(), but nullptr also for null.
inline const text::Json* find_given(const text::Json& object, std::string_view path) {
  const text::Json* const found = find_path(object, path);
  return found == nullptr || found->is_null() ? nullptr : found;
}

/// Whether two values are equal: numbers by value, objects with members in any order, others by
/// their text.
inline bool are_equal(const text::Json& one, const text::Json& other) {
  if (one.is_number() && other.is_number()) return one.number() == other.number();
  if (one.is_array() && other.is_array()) {
    return std::equal(one.elements().begin(), one.elements().end(), other.elements().begin(),
                      other.elements().end(), are_equal);
  }
  if (!one.is_object() || !other.is_object()) return one.compact() == other.compact();
  return one.members().size() == other.members().size() &&
         std::all_of(one.members().begin(), one.members().end(), [&other](const auto& member) {
           const text::Json* const found = other.find(member.key);
           return found != nullptr && are_equal(member.value, *found);
         });
}

}  // namespace ballast::config
