#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>

// Reasons why weights cannot be read, for messages: what a file or folder is instead of a model's
// weights in safetensors, and what to do about it. Texts that continue a message begin with "; " or
// ": " and are empty if no reason is known.

namespace ballast::formats {

/// Number of bytes of a file that foreign_format() needs.
inline constexpr std::size_t kFormatBytes = 40;

/// Describes a file that begins with `bytes` (which may be fewer than kFormatBytes) if it is not
/// safetensors, with advice: "is a git-lfs pointer ...".
std::string_view foreign_format(std::span<const std::byte> bytes);

/// The files that `folder` has instead of model.safetensors or its index.
std::string files_instead(const std::filesystem::path& folder);

/// Advice about a tensor that is not F32, BF16 or F16.
std::string_view remedy_for_dtype(std::string_view dtype);

}  // namespace ballast::formats
