#pragma once

#include <span>
#include <string>
#include <string_view>

#include <cublasLt.h>

namespace ballast::model::cuda {

/// The functions of cuBLASLt that are used. The library is loaded when it is needed and not linked,
/// so that a program with CUDA in it starts on machines without.
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
};

/// The library, loaded once for the whole process. Throws Error(device) with cublaslt_refusal().
const CublasLt& cublaslt();
/// Empty when it can be loaded; else the reason, one line.
std::string_view cublaslt_refusal();

/// What came of loading a library: its functions, or why not.
struct LoadedCublasLt {
  CublasLt functions;
  std::string refusal;
};
/// Loads the first of these (names for the loader's search, or paths) that is there and has the
/// major version that this program is made for. What is loaded stays.
LoadedCublasLt load_cublaslt(std::span<const std::string> names);

}  // namespace ballast::model::cuda
