#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>

#include "ballast/model/attention.h"

#include "src/model/host/kernel_tables.h"
#include "src/model/ops/device_ops.h"

namespace ballast::model::host {

/// State that the operations of the host device share.
template <class T>
struct SharedState {
  SharedState(KernelExtents model, std::size_t team,
              const TypeKernels<T>& table = best_kernels<T>())
      : extents(std::move(model)), threads(team), kernels(table) {}

  [[nodiscard]] const AttentionShape& heads() const { return extents.heads[selected]; }

  KernelExtents extents;
  std::size_t threads;  ///< size of the OpenMP team
  const TypeKernels<T>& kernels;
  std::size_t selected = 0;  ///< number of the shape that AttentionOps::use_heads() has selected
};

template <class T>
using State = std::shared_ptr<SharedState<T>>;

// Operations of the facets of ../ops, spread over the OpenMP team of the calling thread. Results do
// not depend on the number of threads.

template <class T>
void add_attention_ops(const State<T>& state, DeviceOps<T>& to);

}  // namespace ballast::model::host
