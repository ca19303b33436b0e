// Run by mpirun. Every rank runs all tests and makes the same calls. A failed check is only noted
// (EXPECT), because a rank that left a test early would keep the others waiting.
// BALLAST_TEST_DEVICE: "cuda" for buffers of the CUDA device, which also works with a single rank.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/comm/communicator.h"
#include "ballast/core/error.h"

#include "tests/conformance/comm_lane.h"

namespace ballast::comm::comm_test {
namespace {

[[maybe_unused]] const auto* const kWorld = testing::AddGlobalTestEnvironment(new World);

/// The sum over the inputs of all ranks, by a plain loop.
Content expected_sum(std::uint32_t world, Bytes bytes, DType type, std::uint32_t seed) {
  std::vector<Content> contents;
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    contents.push_back(content_of(rank, bytes, type, seed));
  }
  Content sums(bytes);
  for (Bytes at = 0; at < bytes; at += size_of(type)) {
    float sum = element(contents[0], at, type);
    for (std::uint32_t rank = 1; rank < world; ++rank) sum += element(contents[rank], at, type);
    const Bf16 rounded = to_bf16(sum);
    std::memcpy(sums.data() + at, type == DType::f32 ? static_cast<const void*>(&sum) : &rounded,
                size_of(type));
  }
  return sums;
}

std::uint32_t world() {
  return World::ranks().world();
}
std::uint32_t rank() {
  return World::ranks().rank();
}

constexpr Bytes kPartPages[] = {1, 5, 300};

TEST_F(Comm, RankAndWorldAreThoseOfTheLauncher) {
  EXPECT_EQ(World::ranks().kind(), world() == 1 ? "self" : "mpi");
  EXPECT_GT(world(), device_kind() == "host" ? 1U : 0U);
  EXPECT_EQ(World::ranks().launch().local_world, world());
}

TEST_F(Comm, AllGather) {
  const Lane lane("gather");
  for (const Bytes pages : kPartPages) {
    const Bytes size = pages * kPage;
    Content expected;
    for (std::uint32_t r = 0; r < world(); ++r) {
      const Content part = content_of(r, size, DType::f32, 1);
      expected.insert(expected.end(), part.begin(), part.end());
    }
    const DeviceBytes part = lane.filled(content_of(rank(), size, DType::f32, 1));
    const DeviceBytes apart = lane.filled(Content(world() * size));
    const DeviceBytes in_place = lane.filled(Content(world() * size));
    const DeviceBytes own = in_place.subview(rank() * size, size);
    lane.fill(own, content_of(rank(), size, DType::f32, 1));
    lane.channel->all_gather(*lane.stream, part, apart);
    lane.channel->all_gather(*lane.stream, own, in_place);
    lane.stream->synchronize();
    EXPECT_EQ(lane.read(apart), expected) << pages;
    EXPECT_EQ(lane.read(in_place), expected) << pages;
  }
}

/// The part that `from` sends to `to`. The parts have different sizes, also zero, and are no whole
/// pages.
Content part_between(std::uint32_t from, std::uint32_t to, Bytes step) {
  const Bytes bytes = (from + 2 * to) % 3 * step;
  return slice(content_of(from, 2 * step, DType::f32, to + 1), 0, bytes);
}

TEST_F(Comm, AllToAll) {
  const Lane lane("exchange");
  for (const Bytes step : {Bytes{12}, Bytes{100 * kPage + 4}}) {
    Content input;
    Content expected;
    std::vector<Bytes> input_parts;
    std::vector<Bytes> output_parts;
    for (std::uint32_t r = 0; r < world(); ++r) {
      const Content to = part_between(rank(), r, step);
      const Content from = part_between(r, rank(), step);
      input.insert(input.end(), to.begin(), to.end());
      expected.insert(expected.end(), from.begin(), from.end());
      input_parts.push_back(to.size());
      output_parts.push_back(from.size());
    }
    // The bytes after the parts must not change.
    expected.resize(expected.size() + kPage, std::byte{0x5a});
    input.resize(input.size() + kPage);
    const DeviceBytes sent = lane.filled(input);
    const DeviceBytes received = lane.filled(Content(expected.size(), std::byte{0x5a}));
    lane.channel->all_to_all(*lane.stream, sent, input_parts, received, output_parts);
    lane.stream->synchronize();
    EXPECT_EQ(lane.read(received), expected) << step;
    EXPECT_EQ(lane.read(sent), input) << step;
  }
}

void expect_reduce_scatter(const Lane& lane, const Content& input, const Content& expected,
                           DType type, Bytes scratch_pages) {
  const Bytes size = expected.size();
  const DeviceBytes scratch = lane.scratch(scratch_pages);
  const DeviceBytes whole = lane.filled(input);
  const DeviceBytes part = lane.filled(Content(size));
  lane.channel->reduce_scatter(*lane.stream, whole, part, type, scratch);
  lane.stream->synchronize();
  EXPECT_EQ(lane.read(part), expected);
  EXPECT_EQ(lane.read(whole), input);

  lane.channel->reduce_scatter(*lane.stream, whole, whole.subview(rank() * size, size), type,
                               scratch);
  lane.stream->synchronize();
  Content after = input;
  std::ranges::copy(expected, after.begin() + static_cast<std::ptrdiff_t>(rank() * size));
  EXPECT_EQ(lane.read(whole), after) << "in place";
  EXPECT_TRUE(lane.guard_holds(scratch));
}

TEST_F(Comm, ReduceScatter) {
  for (const DType type : {DType::f32, DType::bf16}) {
    const Lane lane("reduce");
    for (const Bytes pages : kPartPages) {
      const Bytes size = pages * kPage;
      const Content input = content_of(rank(), world() * size, type, 2);
      const Content expected =
          slice(expected_sum(world(), world() * size, type, 2), rank() * size, size);
      for (const Bytes scratch :
           {Bytes{world()}, Bytes{2 * world() + 1}, Bytes{7 * world() - 1}, pages * world()}) {
        SCOPED_TRACE(testing::Message() << to_string(type) << ", parts of " << pages
                                        << " pages, scratch of " << scratch);
        expect_reduce_scatter(lane, input, expected, type, scratch);
      }
    }
  }
}

TEST_F(Comm, AllReduceOfAnyNumberOfPages) {
  for (const DType type : {DType::f32, DType::bf16}) {
    const Lane lane("reduce");
    for (const Bytes pages : {1, 2, 3, 4, 5, 12, 61, 500}) {
      const Content expected = expected_sum(world(), pages * kPage, type, 3);
      for (const Bytes scratch_pages : {Bytes{world()}, Bytes{3 * world() + 1}, pages + world()}) {
        const DeviceBytes whole = lane.filled(content_of(rank(), pages * kPage, type, 3));
        const DeviceBytes scratch = lane.scratch(scratch_pages);
        lane.channel->all_reduce(*lane.stream, whole, type, scratch);
        lane.stream->synchronize();
        EXPECT_EQ(lane.read(whole), expected)
            << to_string(type) << ", " << pages << " pages, scratch of " << scratch_pages;
        EXPECT_TRUE(lane.guard_holds(scratch));
      }
    }
  }
}

TEST_F(Comm, AllReduceHasTheBitsOfReduceScatterAndAllGather) {
  const Lane lane("reduce");
  const Bytes size = 12 * kPage;
  for (const DType type : {DType::f32, DType::bf16}) {
    const Content input = content_of(rank(), world() * size, type, 4);
    const DeviceBytes scratch = lane.scratch(2 * world());
    const DeviceBytes at_once = lane.filled(input);
    const DeviceBytes in_two = lane.filled(input);
    const DeviceBytes own = in_two.subview(rank() * size, size);
    lane.channel->all_reduce(*lane.stream, at_once, type, scratch);
    lane.channel->reduce_scatter(*lane.stream, in_two, own, type, scratch);
    lane.channel->all_gather(*lane.stream, own, in_two);
    lane.stream->synchronize();
    EXPECT_EQ(lane.read(at_once), lane.read(in_two));
    EXPECT_EQ(lane.read(at_once) != input, world() > 1);
  }
}

TEST_F(Comm, MembersInAnotherOrderHaveOtherPartsOfTheSameSums) {
  std::vector<std::uint32_t> members;  // members with the last rank first
  for (std::uint32_t r = world(); r-- > 0;) members.push_back(r);
  const std::uint32_t place = world() - 1 - rank();
  const Lane lane("reduce", members);
  const Bytes size = 5 * kPage;
  for (const DType type : {DType::f32, DType::bf16}) {
    const Content sums = expected_sum(world(), world() * size, type, 8);
    const DeviceBytes whole = lane.filled(content_of(rank(), world() * size, type, 8));
    const DeviceBytes own = whole.subview(place * size, size);
    lane.channel->reduce_scatter(*lane.stream, whole, own, type, lane.scratch(2 * world()));
    lane.stream->synchronize();
    EXPECT_EQ(lane.read(own), slice(sums, place * size, size)) << to_string(type);
    lane.channel->all_gather(*lane.stream, own, whole);
    lane.stream->synchronize();
    EXPECT_EQ(lane.read(whole), sums) << to_string(type);
    const DeviceBytes again = lane.filled(content_of(rank(), world() * size, type, 8));
    lane.channel->all_reduce(*lane.stream, again, type, lane.scratch(world()));
    lane.stream->synchronize();
    EXPECT_EQ(lane.read(again), sums) << to_string(type);
  }
}

TEST_F(Comm, ChannelsOfSomeRanksExchangeAmongThemselves) {
  // Even and odd ranks; with three ranks, one channel has a single member.
  std::vector<std::uint32_t> members;
  for (std::uint32_t r = rank() % 2; r < world(); r += 2) members.push_back(r);
  const Lane lane("gather", members);
  const Bytes size = 3 * kPage;
  const DeviceBytes whole = lane.device->allocate(members.size() * size, "whole");
  lane.channel->all_gather(*lane.stream, lane.filled(content_of(rank(), size, DType::f32, 9)),
                           whole);
  lane.stream->synchronize();
  Content expected;
  for (const std::uint32_t r : members) {
    const Content part = content_of(r, size, DType::f32, 9);
    expected.insert(expected.end(), part.begin(), part.end());
  }
  EXPECT_EQ(lane.read(whole), expected);
}

TEST_F(Comm, NansAndInfinitiesReachAllRanks) {
  const Lane lane("reduce");
  Content input = content_of(rank(), kPage, DType::f32, 5);
  const float own = rank() == world() - 1 ? std::nanf("") : INFINITY;
  const float infinite = rank() == 0 ? -INFINITY : 1.0F;
  std::memcpy(input.data(), &own, 4);
  std::memcpy(input.data() + 4, &infinite, 4);
  const DeviceBytes whole = lane.filled(input);
  lane.channel->all_reduce(*lane.stream, whole, DType::f32, lane.scratch(world()));
  lane.stream->synchronize();
  EXPECT_TRUE(std::isnan(element(lane.read(whole), 0, DType::f32)));
  EXPECT_EQ(element(lane.read(whole), 4, DType::f32), -INFINITY);
}

TEST_F(Comm, BroadcastFromEveryRank) {
  const Lane lane("gather");
  for (std::uint32_t root = 0; root < world(); ++root) {
    for (const Bytes pages : kPartPages) {
      const DeviceBytes data = lane.filled(content_of(rank(), pages * kPage, DType::f32, 6));
      lane.channel->broadcast(*lane.stream, data, root);
      lane.stream->synchronize();
      EXPECT_EQ(lane.read(data), content_of(root, pages * kPage, DType::f32, 6)) << root;
    }
  }
}

/// Runs many collectives of different sizes, one after the other, checked at the end. `order`
/// shifts the sizes, so that two channels are never at the same point.
void keep_busy(const Lane& lane, std::uint32_t order) {
  constexpr std::uint32_t kRounds = 30;
  std::vector<DeviceBytes> reduced;
  const DeviceBytes scratch = lane.scratch(2 * world());
  for (std::uint32_t round = 0; round < kRounds; ++round) {
    const Bytes bytes = (1 + (round * 7 + order) % 23) * world() * kPage;
    const DeviceBytes whole = lane.filled(content_of(rank(), bytes, DType::bf16, order + round));
    const DeviceBytes own = whole.subview(rank() * bytes / world(), bytes / world());
    lane.channel->reduce_scatter(*lane.stream, whole, own, DType::bf16, scratch);
    lane.channel->all_gather(*lane.stream, own, whole);
    reduced.push_back(whole);
  }
  lane.stream->synchronize();
  for (std::uint32_t round = 0; round < kRounds; ++round) {
    EXPECT_EQ(lane.read(reduced[round]),
              expected_sum(world(), reduced[round].size(), DType::bf16, order + round))
        << round;
  }
}

TEST_F(Comm, TwoChannelsAndTheHostWorkAtTheSameTime) {
  const Lane gather("gather");
  const Lane reduce("reduce");
  std::thread first([&] { keep_busy(gather, 10); });
  // On GPUs all ranks must start the collectives of different channels in the same order.
  if (device_kind() != "host") first.join();
  std::thread second([&] { keep_busy(reduce, 11); });
  for (int i = 0; i < 50; ++i)
    EXPECT_EQ(World::ranks().broadcast(std::to_string(i)), std::to_string(i));
  if (first.joinable()) first.join();
  second.join();
}

TEST_F(Comm, HostAllGatherOfAnySize) {
  for (const Bytes size : {0, 1, 7, 4097, 1000003}) {
    const auto part_of = [&](std::uint32_t r) {
      Content part(size);
      for (Bytes i = 0; i < size; ++i) part[i] = std::byte(31 * r + i % 251);
      return part;
    };
    Content expected;
    for (std::uint32_t r = 0; r < world(); ++r) {
      const Content part = part_of(r);
      expected.insert(expected.end(), part.begin(), part.end());
    }
    Content whole(world() * size);
    World::ranks().all_gather(part_of(rank()), whole);
    EXPECT_EQ(whole, expected) << size;
  }
}

TEST_F(Comm, HostBroadcastOfText) {
  for (const std::size_t size : {0, 1, 100000}) {
    const std::string of_first(size, 'a');
    EXPECT_EQ(World::ranks().broadcast(rank() == 0 ? of_first : "mine"), of_first);
  }
}

TEST_F(Comm, NoRankLeavesABarrierBeforeAllHaveArrived) {
  const auto now = [] {
    timespec time = {};
    clock_gettime(CLOCK_MONOTONIC, &time);  // one clock for all processes
    return std::int64_t{time.tv_sec} * 1000000000 + time.tv_nsec;
  };
  for (std::uint32_t late = 0; late < world(); ++late) {
    if (rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::int64_t times[2] = {now(), 0};
    World::ranks().barrier();
    times[1] = now();
    std::vector<std::int64_t> all(2 * std::size_t{world()});
    World::ranks().all_gather(std::as_bytes(std::span(times)),
                              std::as_writable_bytes(std::span(all)));
    for (std::size_t r = 0; r < world(); ++r) EXPECT_GE(all[2 * r + 1], all[2 * std::size_t{late}]);
  }
}

}  // namespace
}  // namespace ballast::comm::comm_test
