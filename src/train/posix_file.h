#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>

#include "ballast/core/descriptor.h"
#include "ballast/core/error.h"
#include "ballast/core/units.h"

namespace ballast::train {

/// open(2) with O_CLOEXEC; new files get mode 0666 less the umask. Throws Error(`category`):
/// "cannot open PATH: <strerror>".
Descriptor open_file(const std::filesystem::path& path, int flags, ErrorCategory category);

/// Size of an open regular file in bytes. Throws Error(`category`) when it is no regular file.
Bytes regular_file_size(const Descriptor& file, const std::filesystem::path& path,
                        ErrorCategory category);

/// Fills `out` from byte `offset`, retrying short and interrupted reads. Throws Error(io) naming
/// the file and offset on a failed read, Error(data) when the file ends before.
void read_fully(const Descriptor& file, const std::filesystem::path& path, Bytes offset,
                std::span<std::byte> out);

/// Appends all of `bytes` at the descriptor's position, retrying short and interrupted writes.
/// Throws Error(io) naming the file.
void write_fully(const Descriptor& file, const std::filesystem::path& path,
                 std::span<const std::byte> bytes);

/// fsync(2) of an open file or, by `sync_directory`, of a directory. Throws Error(io).
void sync_file(const Descriptor& file, const std::filesystem::path& path);
void sync_directory(const std::filesystem::path& directory);

}  // namespace ballast::train
