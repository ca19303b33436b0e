#include "src/formats/sha256.h"

#include <array>

#include <fmt/format.h>
#include <openssl/evp.h>

#include "ballast/core/error.h"

namespace ballast::formats {

std::string sha256(std::string_view bytes) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned int size = 0;
  // Fails only if the system's policy of libcrypto forbids the algorithm, or without memory.
  if (EVP_Digest(bytes.data(), bytes.size(), digest.data(), &size, EVP_sha256(), nullptr) != 1) {
    throw Error(ErrorCategory::data, "libcrypto cannot compute SHA-256 on this machine");
  }
  std::string text;
  for (unsigned int i = 0; i < size; ++i) text += fmt::format("{:02x}", digest[i]);
  return text;
}

}  // namespace ballast::formats
