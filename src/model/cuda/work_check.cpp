#include "src/model/cuda/work_check.h"

#include <string>

#include "ballast/core/error.h"

namespace ballast::model::cuda {

void check_work(cudaError_t code, std::string_view what, ShapeOfWork shape,
                device::Stream& stream) {
  std::string name(what);
  for (std::size_t i = 0; i < shape.size(); ++i) {
    name += (i == 0 ? " [" : ", ") + std::to_string(shape[i]);
  }
  name += ']';
  device::check_cuda(code, name);
  try {
    stream.synchronize();
  } catch (const Error& error) {
    throw error.with_context(name);
  }
}

}  // namespace ballast::model::cuda
