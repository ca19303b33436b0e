#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "aio/block_queue.h"
#include "tests/support/aligned_bytes.h"
#include "tests/support/gate_transport.h"
#include "tests/support/temp_dir.h"

namespace ballast::aio {

/// Queues over a transport whose blocks end under the control of the test.
class GatedQueue : public testing::Test {
 protected:
  [[nodiscard]] std::unique_ptr<BlockQueue> queue(const QueueOptions& options) {
    return std::make_unique<BlockQueue>(
        "gate", options, [this](unsigned) { return std::make_unique<test::GateTransport>(gate_); });
  }
  [[nodiscard]] Request request(Direction direction, Bytes offset, Bytes length,
                                bool ahead = false) const {
    return {direction, &file_, offset, memory_.view(0, length), ahead};
  }
  [[nodiscard]] Request request(Direction direction, Bytes offset, Bytes length,
                                std::function<void()> returned) const {
    return {direction, &file_, offset, memory_.view(0, length), false, std::move(returned)};
  }
  /// Ends blocks in the order of their starts until `count` have ended. Returns their offsets.
  std::vector<Bytes> finish_in_turn(std::size_t count, std::size_t first = 0) {
    for (std::size_t i = first; i < count; ++i) {
      gate_.wait_for_starts(i + 1);
      gate_.finish(i);
    }
    std::vector<Bytes> offsets;
    for (const Block& block : gate_.starts()) offsets.push_back(block.offset);
    return offsets;
  }

  test::Gate gate_;
  test::TempDir directory_;
  File file_ = File::create_anonymous(directory_.path(), 1 * kMiB, File::Access::buffered);
  test::AlignedBytes memory_{1 * kMiB};
};

}  // namespace ballast::aio
