#include "src/model/host/bf16_kernels.h"

namespace ballast::model::host {

const Bf16Kernels* bf16_kernels() {
  return nullptr;
}

}  // namespace ballast::model::host
