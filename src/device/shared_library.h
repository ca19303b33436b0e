#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace ballast::device {

// Libraries are loaded on first use instead of linked, so that the program starts on machines
// without them.

/// Looks up functions of a loaded library by name.
class Symbols {
 public:
  explicit Symbols(void* library) : library_(library) {}

  /// Sets `function` to the library's function `name`, or records that it is missing.
  template <class Function>
  void find(const char* name, Function& function) {
    function = reinterpret_cast<Function>(look_up(name));
  }
  /// Returns the first missing function, or "".
  [[nodiscard]] const std::string& missing() const { return missing_; }
  /// Returns the file of the last function found; "" before the first, or if unknown.
  [[nodiscard]] std::string file() const;

 private:
  void* look_up(const char* name);
  void* library_;
  const void* last_ = nullptr;
  std::string missing_;
};

/// Visibility of a library's symbols: only to explicit lookups, or also to libraries that are
/// loaded later.
enum class Scope { own, all };

/// Loads `name` (a path, or a name for the loader's search path), unless it lacks a function that
/// `resolve` looks up, or `resolve` returns a reason to refuse it. An accepted library stays
/// loaded. Returns the reason why it cannot be used, in one line, or "".
std::string load_one(const std::string& name, Scope scope,
                     const std::function<std::string(Symbols&)>& resolve);

/// Formats the version of a CUDA library, 91900 as "9.19.0".
std::string library_version_text(std::size_t version);

/// The functions of a loaded library and its file, or the reason in one line why it could not be
/// loaded.
template <class Functions>
struct Loaded {
  Functions functions;
  std::string file;
  std::string refusal;
};

/// Loads the first of `names` that load_one() accepts. Returns "", or the reason if none can be
/// used: that of the first name that exists but is refused, otherwise that of the first name.
/// `remedy`: advice at the end of the reason.
std::string load_first(std::span<const std::string> names, std::string_view remedy,
                       const std::function<std::string(Symbols&)>& resolve);

/// load_first() for a library whose functions have a lookup (Functions::find(Symbols&)) and a
/// version check (Functions::refusal()).
template <class Functions>
Loaded<Functions> load_library(std::span<const std::string> names, std::string_view remedy) {
  Functions found;
  std::string file;
  const std::string refusal = load_first(names, remedy, [&](Symbols& symbols) {
    found.find(symbols);
    file = symbols.file();
    return symbols.missing().empty() ? found.refusal() : std::string();
  });
  if (!refusal.empty()) return {.functions = {}, .file = "", .refusal = refusal};
  return {.functions = found, .file = file, .refusal = ""};
}

}  // namespace ballast::device
