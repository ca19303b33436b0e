#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/config/resumption.h"

namespace ballast::data {

/// Identifies the data of `files`, wherever they are: "2 files, 17.6 KiB, 18022 tokens,
/// XXH3 0123456789abcdef". The hash is that of the sizes and of all bytes up to 16 MiB; of more
/// data, of 256 pieces of 64 KiB, evenly spread from the first byte to the last one. Throws
/// Error(io), Error(data).
std::string describe_content(const std::vector<std::filesystem::path>& files, std::uint64_t tokens);

/// Settings that determine the results of a run: config::settings_of(), and the content of the
/// training data under the key that names them. Throws like describe_content().
config::Settings settings_of_run(const config::Config& config,
                                 const std::vector<std::filesystem::path>& files,
                                 std::uint64_t tokens);

}  // namespace ballast::data
