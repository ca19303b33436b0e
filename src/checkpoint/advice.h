#pragma once

#include <filesystem>
#include <string>

namespace ballast::checkpoint {

/// Returns the end of a message about the damaged checkpoint `folder` of a copied run: where its
/// states were, and how to copy them. "" if it has no states in the swap files of another run.
std::string advice_for_copy(const std::filesystem::path& folder);

}  // namespace ballast::checkpoint
