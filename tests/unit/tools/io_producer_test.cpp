#include <atomic>
#include <chrono>

#include <gtest/gtest.h>

#include "tools/io_load/load.h"
#include "tools/io_load/producer.h"

namespace ballast::tools::io_producer_test {
namespace {

TEST(IoProducer, MovesABlockEvenIfItsThreadStartsAfterTheTimeIsUp) {
  for (const IoPattern pattern : {IoPattern::read, IoPattern::write, IoPattern::mixed}) {
    IoRegion region = IoRegion::placeholder(4 * kMiB);
    IoLoad load;
    load.pattern = pattern;
    load.backend = "null";
    load.seconds = 0.01;
    const std::atomic<bool> interrupted = false;
    std::atomic<bool> stop = false;
    IoProducer producer(load, region, "test", interrupted, stop);
    const auto start = IoProducer::Clock::now() - std::chrono::seconds(1);
    producer.run(start);
    EXPECT_GT(producer.queue().counters().blocks, 0U) << to_string(pattern);
    EXPECT_GT(producer.ended(), start);
  }
}

}  // namespace
}  // namespace ballast::tools::io_producer_test
