#pragma once

#include <cfenv>

namespace ballast::cpu_adam {

/// Sets this thread to round to nearest with denormals during the object's lifetime.
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatingPoint() { std::fesetenv(&saved_); }
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace ballast::cpu_adam
