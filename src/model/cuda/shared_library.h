#pragma once

#include <array>
#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace ballast::model::cuda {

// Libraries that are loaded when they are needed and not linked, so that a program with CUDA in it
// starts on machines without them.

/// A loaded library's functions by their names.
class Symbols {
 public:
  explicit Symbols(void* library) : library_(library) {}

  /// Sets `function` to the library's function `name`; else remembers that it is missing.
  template <class Function>
  void find(const char* name, Function& function) {
    function = reinterpret_cast<Function>(look_up(name));
  }
  /// The first that was not there, or nothing.
  [[nodiscard]] const std::string& missing() const { return missing_; }

 private:
  void* look_up(const char* name);
  void* library_;
  std::string missing_;
};

/// What came of loading a library: its functions, or why not, in one line.
template <class Functions>
struct Loaded {
  Functions functions;
  std::string refusal;
};

/// Where to look for `name`: under its major version and without one in the loader's search, then
/// in the toolkit that the program was built with.
std::array<std::string, 3> library_names(std::string_view name, int major);

/// Loads the first of `names` (for the loader's search, or paths) that is there, has all functions
/// that `resolve` finds and that `resolve` has nothing against: it returns that, or nothing. What
/// is loaded stays. Returns the reason why the first one will not do where none does: it is the
/// right one, and of the others most are not there. `remedy`: what to do then.
std::string load_first(std::span<const std::string> names, std::string_view remedy,
                       const std::function<std::string(Symbols&)>& resolve);

/// load_first() of a library whose functions find themselves (Functions::find(Symbols&)) and judge
/// their version (Functions::refusal()).
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
