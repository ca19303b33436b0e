#pragma once

#include <cstddef>
#include <random>
#include <string>

namespace ballast::test {

/// Truncates `text` (not empty), flips a bit, or replaces, removes or inserts some bytes, but not
/// spaces.
inline std::string damaged(std::string text, std::mt19937_64& random) {
  std::size_t at = random() % text.size();
  while (text[at] == ' ') at = random() % text.size();  // not the padding of a header
  const std::size_t count = 1 + random() % 8;
  std::string noise(count, '\0');
  for (char& byte : noise) byte = static_cast<char>(random());
  switch (random() % 6) {
    case 0:
      return text.substr(0, at);
    case 1:
      text[at] = static_cast<char>(text[at] ^ (1 << random() % 8));
      return text;
    case 2:
      return text.replace(at, count, noise);
    case 3:
      return text.erase(at, count);
    case 4:
      return text.insert(at, noise);
    default:  // digits and punctuation keep the text closer to JSON
      text[at] = "0123456789{}[]\",:./-e"[random() % 21];
      return text;
  }
}

}  // namespace ballast::test
