#pragma once

#include <string>
#include <vector>

#include "ballast/config/config.h"

#include "src/config/key.h"

namespace ballast::config {

/// `zero_optimization`. DeepSpeed's keys without a meaning are noted in `log`.
Section zero_keys(ZeroSection& zero, std::vector<std::string>& log);

/// `aio`, likewise.
Section aio_keys(AioSection& aio, std::vector<std::string>& log);

}  // namespace ballast::config
