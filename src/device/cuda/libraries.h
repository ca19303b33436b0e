#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <cublasLt.h>

#include "src/device/shared_library.h"

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

/// The functions of cuBLASLt in use. Every run on a GPU needs them.
struct CublasLt {
  decltype(&cublasLtGetVersion) version = nullptr;
  decltype(&cublasLtGetStatusName) status_name = nullptr;
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtDestroy) destroy = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) find_algorithms = nullptr;
  decltype(&cublasLtMatmulDescCreate) create_operation = nullptr;
  decltype(&cublasLtMatmulDescDestroy) destroy_operation = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) set_operation = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) create_layout = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) destroy_layout = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) create_preference = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) destroy_preference = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference = nullptr;

  void find(Symbols& symbols);
  /// Returns why this version cannot be used; "" if it can.
  [[nodiscard]] std::string refusal() const;
};

/// Returns the library, which is searched and loaded once per process. Throws Error(device) with
/// cublaslt_refusal().
const CublasLt& cublaslt();
/// Returns why the library cannot be loaded, in one line; "" if it can.
std::string_view cublaslt_refusal();
/// Returns the path of the loaded file, or "".
std::string_view cublaslt_file();
/// Returns the version of the loaded library, "13.1.0". Throws like cublaslt().
std::string cublaslt_version();

using LoadedCublasLt = Loaded<CublasLt>;
/// Loads the first library in `names` that has the major version of this program's headers.
LoadedCublasLt load_cublaslt(std::span<const std::string> names);

}  // namespace ballast::device
