#include "src/device/cuda/cublaslt.h"

#include <fmt/format.h>

#include "src/device/factories.h"

namespace ballast::device {

void CublasLt::find(Symbols& symbols) {
  symbols.find("cublasLtGetVersion", version);
  symbols.find("cublasLtGetStatusName", status_name);
  symbols.find("cublasLtCreate", create);
  symbols.find("cublasLtDestroy", destroy);
  symbols.find("cublasLtMatmul", matmul);
  symbols.find("cublasLtMatmulAlgoGetHeuristic", find_algorithms);
  symbols.find("cublasLtMatmulDescCreate", create_operation);
  symbols.find("cublasLtMatmulDescDestroy", destroy_operation);
  symbols.find("cublasLtMatmulDescSetAttribute", set_operation);
  symbols.find("cublasLtMatrixLayoutCreate", create_layout);
  symbols.find("cublasLtMatrixLayoutDestroy", destroy_layout);
  symbols.find("cublasLtMatmulPreferenceCreate", create_preference);
  symbols.find("cublasLtMatmulPreferenceDestroy", destroy_preference);
  symbols.find("cublasLtMatmulPreferenceSetAttribute", set_preference);
}

std::string CublasLt::refusal() const {
  const std::size_t major = version() / 10000;
  if (major == CUBLAS_VER_MAJOR) return "";
  return fmt::format("it is version {}, but this program needs version {}", major,
                     CUBLAS_VER_MAJOR);
}

LoadedCublasLt load_cublaslt(std::span<const std::string> names) {
  return load_library<CublasLt>(
      names, fmt::format("install cuBLAS of CUDA {0} (pip install nvidia-cublas{1}) or add its "
                         "folder to LD_LIBRARY_PATH; the bundle of this program for CUDA {2} needs "
                         "cuBLAS of CUDA {2}",
                         CUBLAS_VER_MAJOR, CUBLAS_VER_MAJOR < 13 ? "-cu12" : "",
                         CUBLAS_VER_MAJOR < 13 ? 13 : 12));
}

std::string cublaslt_version() {
  return library_version_text(cublaslt().version());
}

std::string missing_gpu_library() {
  return std::string(cublaslt_refusal());
}

}  // namespace ballast::device
