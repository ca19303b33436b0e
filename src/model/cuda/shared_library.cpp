#include "src/model/cuda/shared_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

namespace ballast::model::cuda {
namespace {

/// The message of dlopen() without the library's name in front.
std::string loader_says(std::string_view name) {
  const char* const text = dlerror();
  std::string_view said = text == nullptr ? "no reason given" : text;
  const std::string prefix = std::string(name) + ": ";
  if (said.starts_with(prefix)) said.remove_prefix(prefix.size());
  return std::string(said);
}

/// Returns why the library `name` cannot be used, or "".
std::string load_one(const std::string& name, const std::function<std::string(Symbols&)>& resolve) {
  void* const library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return loader_says(name);
  Symbols symbols(library);
  std::string refusal = resolve(symbols);
  if (!symbols.missing().empty())
    refusal = fmt::format("it lacks the function {}", symbols.missing());
  if (!refusal.empty()) dlclose(library);
  return refusal;
}

}  // namespace

void* Symbols::look_up(const char* name) {
  void* const found = dlsym(library_, name);
  if (found == nullptr && missing_.empty()) missing_ = name;
  return found;
}

std::array<std::string, 3> library_names(std::string_view name, int major) {
  const std::string versioned = fmt::format("{}.{}", name, major);
  return {versioned, std::string(name), fmt::format("{}/{}", BALLAST_CUDA_LIBRARIES, versioned)};
}

std::string load_first(std::span<const std::string> names, std::string_view remedy,
                       const std::function<std::string(Symbols&)>& resolve) {
  std::string told;
  for (const std::string& name : names) {
    const std::string refusal = load_one(name, resolve);
    if (refusal.empty()) return "";
    if (told.empty()) told = fmt::format("{} cannot be loaded: {}; {}", name, refusal, remedy);
  }
  return told;
}

}  // namespace ballast::model::cuda
