#include "aio/transport.h"

namespace ballast::aio {

std::unique_ptr<Transport> with_faults(std::unique_ptr<Transport> transport) {
  return transport;
}

}  // namespace ballast::aio
