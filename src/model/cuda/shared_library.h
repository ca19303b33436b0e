#pragma once

#include <array>
#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace ballast::model::cuda {

// Libraries that are loaded on first use instead of linked, so that a program with CUDA starts on
// machines without them.

/// Looks up a loaded library's functions by name.
class Symbols {
 public:
  explicit Symbols(void* library) : library_(library) {}

  /// Sets `function` to the library's function `name`, or records that it is missing.
  template <class Function>
  void find(const char* name, Function& function) {
    function = reinterpret_cast<Function>(look_up(name));
  }
  /// The first missing function, or "".
  [[nodiscard]] const std::string& missing() const { return missing_; }

 private:
  void* look_up(const char* name);
  void* library_;
  std::string missing_;
};

/// The functions of a loaded library, or the reason in one line why it could not be loaded.
template <class Functions>
struct Loaded {
  Functions functions;
  std::string refusal;
};

/// Where to look for `name`: under its major version and without one in the loader's search, then
/// in the toolkit that the program was built with.
std::array<std::string, 3> library_names(std::string_view name, int major);

/// Loads the first of `names` (paths, or names for the loader's search path) that exists, has all
/// functions that `resolve` looks up, and that `resolve` accepts by returning "". The library stays
/// loaded. Returns "", or the reason for the first name if none can be used: it is the preferred
/// one, and most of the others do not exist. `remedy` is the advice at the end of the reason.
std::string load_first(std::span<const std::string> names, std::string_view remedy,
                       const std::function<std::string(Symbols&)>& resolve);

/// load_first() for a library whose functions look themselves up (Functions::find(Symbols&)) and
/// check their version (Functions::refusal()).
template <class Functions>
Loaded<Functions> load_library(std::span<const std::string> names, std::string_view remedy) {
  Functions found;
  const std::string refusal = load_first(names, remedy, [&](Symbols& symbols) {
    found.find(symbols);
    return symbols.missing().empty() ? found.refusal() : std::string();
  });
  if (!refusal.empty()) return {.functions = {}, .refusal = refusal};
  return {.functions = found, .refusal = ""};
}

}  // namespace ballast::model::cuda
