#pragma once

#include <cfenv>

namespace ballast::cpu_adam {

/// Sets this thread to round to nearest with denormals during the object's lifetime. Changing the
/// environment takes as long as updating hundreds of weights, so an object within the lifetime of
/// another one does nothing.
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint() {
    if (outermost_ = !in_effect(); !outermost_) return;
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
    in_effect() = true;
  }
  ~DefaultFloatingPoint() {
    if (!outermost_) return;
    std::fesetenv(&saved_);
    in_effect() = false;
  }
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

 private:
  static bool& in_effect() {
    thread_local bool is_set = false;
    return is_set;
  }

  std::fenv_t saved_{};
  bool outermost_ = true;
};

}  // namespace ballast::cpu_adam
