#pragma once

#include <cstddef>

namespace ballast::model::cuda {

/// Threads of a block of kernels whose threads work independently.
inline constexpr unsigned kElementThreads = 256;

/// Blocks for this number of threads.
inline unsigned blocks_of(std::size_t threads) {
  return static_cast<unsigned>((threads + kElementThreads - 1) / kElementThreads);
}

}  // namespace ballast::model::cuda
