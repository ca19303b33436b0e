#include <string>

#include "ballast/device/streams.h"
#include "ballast/update/device_update.h"

#include "cpu_adam/arguments.h"
#include "cpu_adam/workers.h"
#include "src/device/cuda/runtime.h"
#include "src/update/cuda/kernels.h"

namespace ballast::update {
namespace {

class CudaUpdate final : public DeviceUpdate {
 public:
  void step(device::Stream& stream, const cpu_adam::Hyper& hyper,
            const cpu_adam::Shard& shard) override {
    const cudaStream_t queue = device::as_cuda(stream).native();
    require_complete(hyper, shard);
    const cuda::Formats formats = {.weights = shard.weights.format,
                                   .gradient = shard.gradient.type,
                                   .moments = format_of_moments(hyper.optimizer, shard)};
    const cpu_adam::DefaultFloatingPoint for_the_coefficients;
    cpu_adam::Coefficients coefficients = coefficients_of(hyper);
    cpu_adam::for_pieces(shard.first_element, 0, shard.size, [&](Elems start, Elems count) {
      const auto upper = static_cast<std::uint32_t>((shard.first_element + start) >> 32);
      key_draws(coefficients, hyper.step, upper);
      const auto update_alike = [&](Elems first, Elems size, std::uint8_t undecayed) {
        const bool without = undecayed == cpu_adam::kUndecayed;
        cpu_adam::Streams streams = piece_of(hyper.optimizer, shard, first, size);
        if (!without) streams.undecayed = undecayed;
        device::check_cuda(
            cuda::update(queue, hyper.optimizer, formats,
                         without ? without_decay(coefficients) : coefficients, streams),
            "update " + std::string(to_string(hyper.optimizer)));
      };
      for_decays(shard, start, start + count, update_alike);
    });
  }
};

}  // namespace

std::unique_ptr<DeviceUpdate> make_cuda_update(device::Device& device) {
  // Kernels are loaded onto the thread's current GPU; native() makes that the stream's GPU.
  const auto stream = device.make_stream("update");
  static_cast<void>(device::as_cuda(*stream).native());
  device::check_cuda(cuda::load_updates(), "loading the update kernels");
  return std::make_unique<CudaUpdate>();
}

}  // namespace ballast::update
