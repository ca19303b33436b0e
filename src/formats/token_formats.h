#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "ballast/config/choices.h"
#include "ballast/core/descriptor.h"
#include "ballast/core/units.h"

#include "src/formats/token_layout.h"

namespace ballast::formats {

/// How the files of data.tokens are read.
struct TokenUse {
  config::TokenType token_type = config::TokenType::automatic;
  std::uint64_t vocab_size = 0;
  std::filesystem::path model;  ///< a folder with a tokenizer, for advice; "" if unknown
  bool as_is = false;           ///< data.as_is: read files of other formats as headerless tokens
};

/// The layout of an open token file, detected from its content:
///  - Megatron's `NAME.bin`, with the index `NAME.idx` next to it: its type and sizes are checked
///    against the file; ids are U8, U16 or I32.
///  - llm.c's: a header of 1 KiB with the number of tokens, which are u16 or u32.
///  - NumPy's `.npy`: an array of one dimension of little-endian integers.
///  - otherwise headerless tokens of `token_type` u16 or u32, or auto: u16 if `vocab_size` allows
///    it.
/// Throws Error(data) naming the file for an index or header that contradicts the file or
/// `token_type`, for a size that is not a multiple of the token, for ids that seem to have another
/// size, and, unless `as_is`, for a file of another format (see refuse_other_format()).
TokenLayout layout_of(const std::filesystem::path& path, const Descriptor& file,
                      const TokenUse& use);

/// A hint for an id of `file` outside the vocabulary: another type of its tokens, or
/// data for another model. `at`: its byte in the file.
std::string advice_for_id(const std::filesystem::path& path, const Descriptor& file,
                          const TokenLayout& layout, Bytes at, std::uint64_t vocab_size);

}  // namespace ballast::formats
