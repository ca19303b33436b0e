#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace ballast::device {

// Libraries that are loaded on first use instead of linked, so that the program starts on machines
// without them.

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
  /// The file that the function found last belongs to, "" before the first or if it is unknown.
  [[nodiscard]] std::string file() const;

 private:
  void* look_up(const char* name);
  void* library_;
  const void* last_ = nullptr;
  std::string missing_;
};

/// Who finds a library's symbols by name: only those who ask it, or also all libraries that are
/// loaded later.
enum class Scope { own, all };

/// Loads `name` (a path, or a name for the loader's search path), unless it lacks a function that
/// `resolve` looks up or `resolve` refuses it by returning a reason. A library that is accepted
/// stays loaded. Returns the reason why it cannot be used, one line, or "".
std::string load_one(const std::string& name, Scope scope,
                     const std::function<std::string(Symbols&)>& resolve);

/// The functions of a loaded library and the file it was loaded from, or the reason in one line why
/// it could not be loaded.
template <class Functions>
struct Loaded {
  Functions functions;
  std::string file;
  std::string refusal;
};

/// Loads the first of `names` that load_one() accepts. Returns "", or the reason if none can be
/// used: that of the first name that exists but is refused, otherwise that of the first name.
/// `remedy` is the advice at the end of the reason.
std::string load_first(std::span<const std::string> names, std::string_view remedy,
                       const std::function<std::string(Symbols&)>& resolve);

/// load_first() for a library whose functions look themselves up (Functions::find(Symbols&)) and
/// check their version (Functions::refusal()).
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
