#include "ballast/core/build_info.h"

namespace ballast {

std::string_view version() noexcept {
  return BALLAST_VERSION;
}

}  // namespace ballast
