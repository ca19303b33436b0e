#include "src/model/host/ops.h"

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "ballast/core/clocks.h"
#include "ballast/core/units.h"
#include "ballast/device/streams.h"

#include "src/model/host/products.h"

namespace ballast::model::host {
namespace {

template <class T>
class HostQueue final : public WorkQueue {
 public:
  explicit HostQueue(State<T> state) : state_(std::move(state)) {}

  void run(device::Stream& stream, std::function<void()> work) override {
    device::as_host(stream).enqueue([work = std::move(work)] {
      const KernelClock clock(KernelGroup::pass);
      work();
    });
  }
  [[nodiscard]] std::string arithmetic() const override {
    return describe_arithmetic(state_->threads);
  }
  void take_memory(Bump& bump) override { state_->take_memory(bump); }

 private:
  State<T> state_;
};

}  // namespace

template <class T>
DeviceOps<T> make_ops(const KernelExtents& extents, std::size_t threads, const MlpRule& mlp_rule) {
  const auto state = std::make_shared<SharedState<T>>(extents, threads);
  DeviceOps<T> ops;
  add_row_ops(state, ops);
  add_packing_ops(state, ops);
  add_product_ops(state, ops);
  add_expert_ops(state, ops);
  add_token_ops(state, ops);
  add_attention_ops(state, ops);
  ops.queue = std::make_shared<HostQueue<T>>(state);
  ops.traits = {.mlp = mlp_rule,
                .logit_bytes = 128 * kMiB,
                .sums_in_parts = [](std::size_t /*extent*/) { return false; }};
  return ops;
}

template DeviceOps<float> make_ops(const KernelExtents&, std::size_t, const MlpRule&);
template DeviceOps<Bf16> make_ops(const KernelExtents&, std::size_t, const MlpRule&);
template DeviceOps<F16> make_ops(const KernelExtents&, std::size_t, const MlpRule&);

}  // namespace ballast::model::host
