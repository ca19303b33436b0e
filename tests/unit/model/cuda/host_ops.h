#pragma once

#include "src/model/host/ops.h"

namespace ballast::test {

namespace host = model::host;

/// The host device's operations whose sizes are all arguments.
template <class T>
host::Ops<T> host_ops() {
  model::ModelConfig config;
  config.num_layers = config.num_heads = config.num_kv_heads = 1;
  config.hidden_size = config.head_dim = 16;
  return host::Ops<T>(config, {.sequences = 1, .length = 1}, 1);
}

}  // namespace ballast::test
