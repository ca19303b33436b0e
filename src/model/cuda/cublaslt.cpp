#include "src/model/cuda/cublaslt.h"

#include <dlfcn.h>
#include <fmt/format.h>

namespace ballast::model::cuda {
namespace {

/// What dlopen() or dlsym() has to say, without the library's name in front.
std::string loader_says(std::string_view name) {
  const char* const text = dlerror();
  std::string_view said = text == nullptr ? "no reason given" : text;
  const std::string prefix = std::string(name) + ": ";
  if (said.starts_with(prefix)) said.remove_prefix(prefix.size());
  return std::string(said);
}

/// Sets `function` to the library's function `name`; else notes in `missing` that it is not there.
template <class Function>
void resolve(void* library, const char* name, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr && missing.empty()) missing = name;
}

/// Returns the name of a function that the library lacks, or nothing.
std::string resolve_all(void* library, CublasLt& lt) {
  std::string missing;
  resolve(library, "cublasLtGetVersion", lt.version, missing);
  resolve(library, "cublasLtGetStatusName", lt.status_name, missing);
  resolve(library, "cublasLtCreate", lt.create, missing);
  resolve(library, "cublasLtDestroy", lt.destroy, missing);
  resolve(library, "cublasLtMatmul", lt.matmul, missing);
  resolve(library, "cublasLtMatmulAlgoGetHeuristic", lt.find_algorithms, missing);
  resolve(library, "cublasLtMatmulDescCreate", lt.create_operation, missing);
  resolve(library, "cublasLtMatmulDescDestroy", lt.destroy_operation, missing);
  resolve(library, "cublasLtMatmulDescSetAttribute", lt.set_operation, missing);
  resolve(library, "cublasLtMatrixLayoutCreate", lt.create_layout, missing);
  resolve(library, "cublasLtMatrixLayoutDestroy", lt.destroy_layout, missing);
  resolve(library, "cublasLtMatmulPreferenceCreate", lt.create_preference, missing);
  resolve(library, "cublasLtMatmulPreferenceDestroy", lt.destroy_preference, missing);
  resolve(library, "cublasLtMatmulPreferenceSetAttribute", lt.set_preference, missing);
  return missing;
}

/// Returns why the library `name` will not do, or nothing.
std::string load_one(const std::string& name, CublasLt& lt) {
  void* const library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return loader_says(name);
  if (const std::string missing = resolve_all(library, lt); !missing.empty()) {
    dlclose(library);
    return fmt::format("it has no {}", missing);
  }
  const std::size_t major = lt.version() / 10000;
  if (major == CUBLAS_VER_MAJOR) return "";
  dlclose(library);
  return fmt::format("it is version {}, this program is made for {}", major, CUBLAS_VER_MAJOR);
}

}  // namespace

LoadedCublasLt load_cublaslt(std::span<const std::string> names) {
  LoadedCublasLt loaded;
  for (const std::string& name : names) {
    const std::string refusal = load_one(name, loaded.functions);
    if (refusal.empty()) return {.functions = loaded.functions, .refusal = ""};
    // The first name is the right one; of the others most are not there.
    if (!loaded.refusal.empty()) continue;
    loaded.refusal = fmt::format(
        "{} cannot be loaded: {}; install CUDA's cuBLAS or add its folder to LD_LIBRARY_PATH", name,
        refusal);
  }
  loaded.functions = {};
  return loaded;
}

}  // namespace ballast::model::cuda
