#include "src/device/shared_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

namespace ballast::device {
namespace {

/// Returns the message of dlopen() without the library's name at its beginning.
std::string loader_says(std::string_view name) {
  const char* const text = dlerror();
  std::string_view said = text == nullptr ? "no reason given" : text;
  const std::string prefix = std::string(name) + ": ";
  if (said.starts_with(prefix)) said.remove_prefix(prefix.size());
  return std::string(said);
}

/// Returns whether dlopen() refused a library because it found no file.
bool is_absence(std::string_view refusal) {
  return refusal.starts_with("cannot open shared object file: No such file");
}

}  // namespace

void* Symbols::look_up(const char* name) {
  void* const found = dlsym(library_, name);
  if (found == nullptr && missing_.empty()) missing_ = name;
  if (found != nullptr) last_ = found;
  return found;
}

std::string Symbols::file() const {
  Dl_info where = {};
  const bool known = last_ != nullptr && dladdr(last_, &where) != 0 && where.dli_fname != nullptr;
  return known ? where.dli_fname : "";
}

std::string load_one(const std::string& name, Scope scope,
                     const std::function<std::string(Symbols&)>& resolve) {
  void* const library =
      dlopen(name.c_str(), RTLD_NOW | (scope == Scope::all ? RTLD_GLOBAL : RTLD_LOCAL));
  if (library == nullptr) return loader_says(name);
  Symbols symbols(library);
  std::string refusal = resolve(symbols);
  if (!symbols.missing().empty())
    refusal = fmt::format("it lacks the function {}", symbols.missing());
  if (!refusal.empty()) dlclose(library);
  return refusal;
}

std::string load_first(std::span<const std::string> names, std::string_view remedy,
                       const std::function<std::string(Symbols&)>& resolve) {
  std::string absence;
  std::string refused;
  for (const std::string& name : names) {
    const std::string refusal = load_one(name, Scope::own, resolve);
    if (refusal.empty()) return "";
    std::string& said = is_absence(refusal) ? absence : refused;
    if (said.empty()) said = fmt::format("{} cannot be loaded: {}; {}", name, refusal, remedy);
  }
  return refused.empty() ? absence : refused;
}

std::string library_version_text(std::size_t version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace ballast::device
