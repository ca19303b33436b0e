#pragma once

#include <span>
#include <string>
#include <string_view>

#include <cublasLt.h>

#include "src/device/shared_library.h"

namespace ballast::device {

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
