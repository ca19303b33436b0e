#include "ballast/aio/buffer_pool.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <sys/mman.h>

#include "ballast/core/error.h"

namespace ballast::aio {
namespace {

TEST(BufferPool, LendsEveryPieceOfOneMappingOnce) {
  BufferPool pool(5, 3 * kPage - 1, "test");
  EXPECT_EQ(pool.memory().size(), 15 * kPage);
  std::vector<Lease> leases;
  std::set<std::byte*> starts;
  for (int i = 0; i < 5; ++i) {
    leases.push_back(pool.acquire());
    const HostBytes bytes = leases.back().bytes();
    EXPECT_EQ(bytes.size(), 3 * kPage);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(bytes.data()) % kPage, 0U);
    EXPECT_GE(bytes.data(), pool.memory().data());
    EXPECT_LE(bytes.data() + bytes.size(), pool.memory().data() + pool.memory().size());
    starts.insert(bytes.data());
    std::fill(bytes.begin(), bytes.end(), std::byte{1});
  }
  EXPECT_EQ(starts.size(), 5U);
  EXPECT_EQ(pool.available(), 0U);
  EXPECT_FALSE(pool.try_acquire().has_value());
  std::byte* const returned = leases[2].bytes().data();
  leases[2].release();
  EXPECT_EQ(pool.available(), 1U);
  EXPECT_EQ(pool.try_acquire()->bytes().data(), returned);
}

TEST(BufferPool, AnAcquireWaitsForALeaseToEnd) {
  BufferPool pool(2, kPage, "test");
  std::atomic<int> in_use = 0;
  std::atomic<bool> too_many = false;
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        const Lease lease = pool.acquire();
        if (++in_use > 2) too_many = true;
        lease.bytes()[0] = std::byte{7};
        --in_use;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_FALSE(too_many);
  EXPECT_EQ(pool.available(), 2U);
}

TEST(BufferPool, IsResidentFromTheStart) {
  const BufferPool pool(4, 16 * kPage, "test");
  std::vector<unsigned char> resident(pool.memory().size() / kPage);
  ASSERT_EQ(mincore(pool.memory().data(), pool.memory().size(), resident.data()), 0);
  EXPECT_TRUE(std::ranges::all_of(resident, [](unsigned char page) { return (page & 1U) != 0; }));
}

TEST(BufferPool, MemoryThatIsRefusedIsOneLineWithTheName) {
  try {
    const BufferPool pool(1, Bytes{1} << 60, "buffers of the test");
    FAIL() << "an exabyte was granted";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::memory);
    EXPECT_NE(std::string(error.what()).find("buffers of the test"), std::string::npos);
  }
}

}  // namespace
}  // namespace ballast::aio
