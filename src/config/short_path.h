#pragma once

#include <functional>
#include <string>

namespace ballast::config {

/// The path of the key or section that `path` names without its section: "lr" is
/// optimizer.params.lr. Returns a path that begins at the top, or that no section has, unchanged.
/// Calls `refuse`, which throws, if several sections have it.
std::string whole_path(const std::string& path,
                       const std::function<void(const std::string&)>& refuse);

}  // namespace ballast::config
