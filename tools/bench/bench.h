#pragma once

#include <string>

namespace ballast::tools {

/// What --device takes, for --help.
inline constexpr const char* kBenchDevices = "auto (cuda where there is a GPU), host or cuda";

/// "host" or "cuda" for what --device of `command` asks for. Throws Error for what is no device,
/// and when there is none of what was asked for.
std::string bench_device(const std::string& command, const std::string& asked);

}  // namespace ballast::tools
