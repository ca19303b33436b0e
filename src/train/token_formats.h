#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "ballast/core/descriptor.h"
#include "ballast/core/units.h"

namespace ballast::train {

/// Where the tokens of a file are: `count` little-endian ids of `width` bytes from byte `offset`.
struct TokenLayout {
  Bytes offset = 0;
  std::size_t width = 1;
  std::uint64_t count = 0;
};

/// The layout of an open token file, detected by its content:
///  - Megatron's `NAME.bin`, with the index `NAME.idx` beside it: its type and sizes are checked
///    against the file; ids are U8, U16 or I32.
///  - llm.c's: a header of 1 KiB with the number of tokens, which are u16 or u32.
///  - otherwise tokens alone, of `token_type` u16 or u32, or auto: u16 if `vocab_size` allows it.
/// Throws Error(data) naming the file for an index or header that contradicts the file or
/// `token_type`, and for a size that is not a multiple of the token.
TokenLayout layout_of(const std::filesystem::path& path, const Descriptor& file,
                      const std::string& token_type, std::uint64_t vocab_size);

}  // namespace ballast::train
