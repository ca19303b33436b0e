#include "src/device/cuda/libraries.h"

#include <algorithm>
#include <cstdlib>
#include <system_error>

#include <fmt/format.h>

#include "src/device/implementations.h"

namespace ballast::device {

namespace {

namespace fs = std::filesystem;

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

/// Returns the entries of `folder` whose names begin with `prefix`: "python3.12" before
/// "python3.9". Empty if the folder cannot be read.
std::vector<fs::path> entries(const fs::path& folder, std::string_view prefix) {
  std::vector<fs::path> found;
  std::error_code error;
  for (auto i = fs::directory_iterator(folder, error); !error && i != fs::end(i);
       i.increment(error)) {
    if (i->path().filename().string().starts_with(prefix)) found.push_back(i->path());
  }
  std::sort(found.begin(), found.end(), [](const fs::path& a, const fs::path& b) {
    const auto a_size = a.native().size();
    const auto b_size = b.native().size();
    return a_size != b_size ? a_size > b_size : a > b;
  });
  return found;
}

/// Returns the prefixes of the python3 that PATH finds: that of its name and, if it is a link, that
/// of the file.
std::vector<fs::path> python_prefixes(std::string_view path) {
  while (!path.empty()) {
    const std::size_t end = std::min(path.find(':'), path.size());
    const fs::path program = fs::path(path.substr(0, end)) / "python3";
    path.remove_prefix(std::min(end + 1, path.size()));
    if (!program.is_absolute() || !is_there(program)) continue;
    std::error_code error;
    const fs::path file = fs::canonical(program, error);
    std::vector<fs::path> prefixes = {program.parent_path().parent_path()};
    if (!error && file.parent_path().parent_path() != prefixes.front()) {
      prefixes.push_back(file.parent_path().parent_path());
    }
    return prefixes;
  }
  return {};
}

/// Adds the library folders of the wheels of the Python at `prefix`.
void add_wheels(const fs::path& prefix, std::vector<fs::path>& folders) {
  for (const fs::path& python : entries(prefix / "lib", "python3")) {
    for (const std::string_view packages : {"site-packages", "dist-packages"}) {
      for (const fs::path& package : entries(python / packages / "nvidia", "")) {
        folders.push_back(package / "lib");
      }
    }
  }
}

std::vector<fs::path> folders_of(const SearchEnvironment& environment) {
  std::vector<fs::path> folders;
  for (const std::string& toolkit : {environment.cuda_home, environment.cuda_path}) {
    if (toolkit.empty()) continue;
    folders.push_back(fs::path(toolkit) / "lib64");
    folders.push_back(fs::path(toolkit) / "lib");
  }
  folders.emplace_back(BALLAST_CUDA_LIBRARIES);
  folders.push_back(environment.system / "usr/local/cuda/lib64");
  for (const std::string& prefix : {environment.virtual_env, environment.conda_prefix}) {
    if (!prefix.empty()) add_wheels(prefix, folders);
  }
  for (const fs::path& prefix : python_prefixes(environment.path)) add_wheels(prefix, folders);
  if (!environment.home.empty()) add_wheels(fs::path(environment.home) / ".local", folders);
  add_wheels(environment.system / "usr/local", folders);
  add_wheels(environment.system / "usr", folders);
  return folders;
}

}  // namespace

SearchEnvironment search_environment() {
  return {.cuda_home = variable("CUDA_HOME"),
          .cuda_path = variable("CUDA_PATH"),
          .virtual_env = variable("VIRTUAL_ENV"),
          .conda_prefix = variable("CONDA_PREFIX"),
          .path = variable("PATH"),
          .home = variable("HOME")};
}

std::vector<std::string> library_names(std::string_view name, int major,
                                       const SearchEnvironment& environment) {
  const std::string versioned = fmt::format("{}.{}", name, major);
  std::vector<std::string> names = {versioned, std::string(name)};
  for (const fs::path& folder : folders_of(environment)) {
    const std::string file = (folder / versioned).string();
    if (is_there(file) && std::find(names.begin(), names.end(), file) == names.end()) {
      names.push_back(file);
    }
  }
  return names;
}

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
