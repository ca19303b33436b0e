#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/config/resumption.h"

namespace ballast::data {

/// Identifies the data in `files`, independent of their paths: "2 files, 17.6 KiB, 18022 tokens,
/// XXH3 0123456789abcdef". The hash covers the sizes and, up to 16 MiB, all bytes; of larger data,
/// 256 pieces of 64 KiB that are evenly spread from the first byte to the last. Throws Error(io),
/// Error(data).
std::string describe_content(const std::vector<std::filesystem::path>& files, std::uint64_t tokens);

/// Returns the settings that determine the results of a run: config::settings_of(), and the content
/// of the training data under the key of its files. Throws like describe_content().
config::Settings settings_of_run(const config::Config& config,
                                 const std::vector<std::filesystem::path>& files,
                                 std::uint64_t tokens);

}  // namespace ballast::data
