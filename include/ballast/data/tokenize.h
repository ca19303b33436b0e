#pragma once

#include <atomic>
#include <filesystem>

#include "ballast/data/tokens.h"
#include "ballast/text/output_file.h"

namespace ballast::data {

/// Writes every token of `source` to `path` as 16-bit little-endian ids, atomically. `interrupted`
/// (may be null) stops it with Error(interrupted). Throws like text::OutputFile; Error(data) for an
/// id above 65,535.
void write_tokens(const TokenSource& source, const std::filesystem::path& path,
                  const text::OutputRule& rule, const std::atomic<bool>* interrupted = nullptr);

}  // namespace ballast::data
