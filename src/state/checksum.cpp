#include "ballast/state/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ballast::state {

std::uint64_t checksum(ConstHostBytes bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

struct RunningChecksum::State {
  XXH3_state_t xxh3;
};

RunningChecksum::RunningChecksum() : state_(std::make_unique<State>()) {
  XXH3_64bits_reset(&state_->xxh3);
}

RunningChecksum::~RunningChecksum() = default;

void RunningChecksum::add(ConstHostBytes bytes) {
  XXH3_64bits_update(&state_->xxh3, bytes.data(), bytes.size());
}

std::uint64_t RunningChecksum::digest() const {
  return XXH3_64bits_digest(&state_->xxh3);
}

}  // namespace ballast::state
