#pragma once

#include <string>
#include <string_view>

namespace ballast::device {

/// GPUs for which this program has machine code, as compute capabilities times ten: "80, 89, 90".
/// Empty if the build chose them itself (-Dgpu_architectures=native).
extern const char* const kMachineCode;

/// Returns whether the driver compiles kernels for a GPU of compute capability `capability` (times
/// ten) when they are first used, if a program has machine code for `codes` and PTX of the lowest
/// from 8.0 on. Machine code runs on GPUs of the same major number and the same or a larger minor
/// one. Source: NVIDIA, "CUDA C++ Programming Guide", section 3.1.2.
bool compiles_kernels(std::string_view codes, int capability);

/// Formats `codes`: "8.0, 8.9, 9.0".
std::string describe_codes(std::string_view codes);

/// Logs, once per process and kind of GPU, that the driver compiles the kernels for the GPU `name`.
void log_compilation(const std::string& name, int capability);

}  // namespace ballast::device
