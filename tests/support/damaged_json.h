#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "ballast/text/json.h"

#include "tests/support/damaged.h"

namespace ballast::test {

using AnyJson = nlohmann::ordered_json;

/// `value` and all values inside it.
inline void collect_values(AnyJson& value, std::vector<AnyJson*>& found) {
  found.push_back(&value);
  if (value.is_structured()) {
    for (auto& inner : value) collect_values(inner, found);
  }
}

/// JSON texts that readers get wrong: numbers out of range, shapes whose product overflows, paths
/// out of the folder, halves of surrogates, bytes that are not UTF-8, deep nesting, other types.
inline std::string hostile_value(std::mt19937_64& random) {
  static const auto values = text::words_of(
      "0 1 -1 -0.0 1.5 2147483648 4294967296 9007199254740993 9223372036854775807 "
      "9223372036854775808 18446744073709551615 18446744073709551616 1e308 1e400 -1e-400 "
      "[4294967296,4294967296] [9223372036854775807,2,0] "
      "[18446744073709551615,18446744073709551615] [0,18446744073709551615] [-1,2] [[2],[2]] "
      "[0,9223372036854775807] [4,0] [1,1] \"\" \".\" \"..\" \"../../x\" \"/dev/zero\" \"x/y\" "
      "\"a\\u0000b\" \"\\ud800\" \"\\udc00\\ud800\" \"\xff\xfe\" \"\xc0\xaf\" \"\xed\xa0\x80\" "
      "\"\xf4\x90\x80\x80\" \"\\n\\u001b[2J\" \"F64\" \"I8\" \"BF16\" null true false {} [] NaN "
      "Infinity [1,] {\"a\":1,\"a\":2}");
  switch (random() % 16) {
    case 0: {
      const std::size_t depth = 1 + random() % 3000;
      return std::string(depth, '[') + std::string(depth, ']');
    }
    case 1: {
      std::string deep = "0";
      for (std::size_t depth = random() % 600; depth > 0; --depth) deep = "{\"a\":" + deep + "}";
      return deep;
    }
    case 2:
      return '"' + std::string(random() % 70000, 'x') + '"';
    case 3:
      return std::to_string(random());
    default:
      return std::string(values[random() % values.size()]);
  }
}

/// `text`, which is JSON, with one value replaced, removed, exchanged with another one, or given a
/// second time under the same key.
inline std::string damaged_json(const std::string& text, std::mt19937_64& random) {
  const std::string mark = "@mark@";
  AnyJson whole = AnyJson::parse(text);
  std::vector<AnyJson*> values;
  collect_values(whole, values);
  AnyJson& value = *values[random() % values.size()];
  AnyJson& other = *values[random() % values.size()];
  std::string raw = hostile_value(random);
  std::string quoted = '"' + mark + '"';
  switch (random() % 4) {
    case 0: {
      const AnyJson first = value;
      const AnyJson second = other;
      other = first;  // which destroys `value` if it is inside
      if (!first.is_structured() && !second.is_structured()) value = second;
      return whole.dump();
    }
    case 1:
      if (value.is_object() && !value.empty()) {
        auto member = value.begin();
        std::advance(member, static_cast<std::ptrdiff_t>(random() % value.size()));
        raw = AnyJson(member.key()).dump();
        const AnyJson copy = member.value();
        value[mark] = random() % 2 == 0 ? copy : AnyJson(random() % 100);
        break;
      }
      [[fallthrough]];
    default:
      value = mark;
  }
  std::string out = whole.dump();
  return out.replace(out.find(quoted), quoted.size(), raw);
}

/// A safetensors file whose header is damaged like JSON, with the length of the new header.
inline std::string damaged_safetensors(const std::string& file, std::mt19937_64& random) {
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof(length));
  const std::string header = damaged_json(file.substr(sizeof(length), length), random);
  const std::string data = file.substr(sizeof(length) + length);
  length = header.size();
  std::string out(sizeof(length), '\0');
  std::memcpy(out.data(), &length, sizeof(length));
  return out + header + data;
}

}  // namespace ballast::test
