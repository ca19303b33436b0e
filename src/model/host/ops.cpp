#include "src/model/host/ops.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/units.h"
#include "ballast/device/streams.h"

#include "src/model/host/team.h"

namespace ballast::model::host {
template <class T>
Ops<T>::Ops(const KernelExtents& extents, std::size_t threads, const MlpRule& mlp_rule)
    : state_(std::make_shared<SharedState<T>>(extents, threads)),
      threads_(threads),
      mlp_rule_(mlp_rule) {
  add_row_ops(state_, *this);
  add_packing_ops(state_, *this);
  add_product_ops(state_, *this);
  add_expert_ops(state_, *this);
  add_token_ops(state_, *this);
  add_attention_ops(state_, *this);
}

template <class T>
void Ops<T>::run(device::Stream& stream, std::function<void()> work) {
  as_host(stream).enqueue([work = std::move(work)] {
    const KernelClock clock(KernelGroup::pass);
    work();
  });
}

template class Ops<float>;
template class Ops<Bf16>;
template class Ops<F16>;

}  // namespace ballast::model::host
