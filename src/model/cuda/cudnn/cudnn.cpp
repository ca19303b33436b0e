#include "src/model/cuda/cudnn/cudnn.h"

#include <fmt/format.h>

namespace ballast::model::cuda {
namespace {

/// The first whose attention has none of the known mistakes (NVIDIA's cudnn-frontend,
/// sdpa_support_surface.h, names versions up to 9.10.1), takes heads of more than 128 values and
/// minus infinity as what hides a score.
constexpr std::size_t kOldest = 91002;

std::string text_of(std::size_t version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace

void Cudnn::find(Symbols& symbols) {
  symbols.find("cudnnGetVersion", version);
  symbols.find("cudnnGetErrorString", status_name);
  symbols.find("cudnnGetLastErrorString", last_error);
  symbols.find("cudnnCreate", create);
  symbols.find("cudnnDestroy", destroy);
  symbols.find("cudnnSetStream", set_stream);
  symbols.find("cudnnBackendCreateDescriptor", create_descriptor);
  symbols.find("cudnnBackendDestroyDescriptor", destroy_descriptor);
  symbols.find("cudnnBackendSetAttribute", set_attribute);
  symbols.find("cudnnBackendGetAttribute", get_attribute);
  symbols.find("cudnnBackendFinalize", finalize);
  symbols.find("cudnnBackendExecute", execute);
}

std::string Cudnn::refusal() const {
  const std::size_t found = version();
  if (found / 10000 != CUDNN_MAJOR) {
    return fmt::format("it is version {}, this program is made for {}", text_of(found),
                       CUDNN_MAJOR);
  }
  if (found >= kOldest) return "";
  return fmt::format("it is version {}, and attention needs at least {}", text_of(found),
                     text_of(kOldest));
}

LoadedCudnn load_cudnn(std::span<const std::string> names) {
  return load_library<Cudnn>(names, "install cuDNN or add its folder to LD_LIBRARY_PATH");
}

}  // namespace ballast::model::cuda
