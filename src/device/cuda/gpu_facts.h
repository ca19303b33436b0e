#pragma once

#include <string>

namespace ballast::device {

/// Formats a version of CUDA: 13000 is "13.0".
std::string cuda_version_text(int version);

/// Returns the properties of the calling thread's current GPU that the bits of kernels may depend
/// on: "NVIDIA H100 80GB HBM3 with 132 multiprocessors, driver 580.95.05, CUDA 13.0". CUDA is the
/// toolkit of this program. Throws Error(device).
std::string gpu_facts();

}  // namespace ballast::device
