#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace ballast::device {

/// Inputs of the search for NVIDIA's libraries: environment variables of the process, "" if unset,
/// and the root folder of the system's places.
struct SearchEnvironment {
  std::string cuda_home;
  std::string cuda_path;
  std::string virtual_env;
  std::string conda_prefix;
  std::string path;
  std::string home;
  std::filesystem::path system = "/";
};
SearchEnvironment search_environment();

/// Returns where to look for the library `name` ("libnccl.so"), in this order: with its major
/// version and without one in the loader's search; in the toolkits of CUDA_HOME and CUDA_PATH, the
/// one with which the program was built, and /usr/local/cuda; in the wheels (site-packages/nvidia)
/// of the active Python environment, of the python3 in PATH, of the user and of the system, newest
/// Python first. All paths exist. Python is not started.
std::vector<std::string> library_names(std::string_view name, int major,
                                       const SearchEnvironment& environment = search_environment());

}  // namespace ballast::device
