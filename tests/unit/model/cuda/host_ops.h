#pragma once

#include "src/model/host/ops.h"

namespace ballast::test {

namespace host = model::host;

/// The host device's operations whose sizes are all arguments.
template <class T>
model::DeviceOps<T> host_ops() {
  return host::make_ops<T>({.hidden = 16, .heads = {{.head_dim = 16}}, .widest_sum = 48}, 1);
}

}  // namespace ballast::test
