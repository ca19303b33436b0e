#pragma once

#include <filesystem>
#include <string>

namespace ballast::device {

/// Returns the root folder of the files below, "/". Tests replace it.
std::filesystem::path driver_root();

/// Returns the version of the NVIDIA kernel driver, "580.95.05"; "" if it is unknown. The CUDA
/// runtime only reports the CUDA version that a driver supports.
std::string driver_version(const std::filesystem::path& root = driver_root());

/// Returns whether the kernel offers an NVIDIA GPU to this process (/dev/nvidia0, and /dev/dxg in
/// WSL). Unlike the CUDA runtime, this also finds GPUs whose driver is too old for the program.
bool has_gpu_file(const std::filesystem::path& root = driver_root());

}  // namespace ballast::device
