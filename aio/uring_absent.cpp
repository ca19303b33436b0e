#include "ballast/core/error.h"

#include "aio/transport.h"

namespace ballast::aio {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCategory::io,
              "built without liburing: install it and reconfigure with -Dio_uring=enabled");
}

}  // namespace

std::string probe_uring() {
  refuse();
}

std::unique_ptr<Transport> make_uring_transport(unsigned, const QueueOptions&,
                                                const Registration&) {
  refuse();
}

}  // namespace ballast::aio
