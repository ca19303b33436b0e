#include "ballast/core/descriptor.h"

#include <unistd.h>

namespace ballast {

Descriptor::~Descriptor() {
  if (number_ >= 0) close(number_);
}

}  // namespace ballast
