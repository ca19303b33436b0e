#include <cstdint>
#include <string>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/memory/ledger.h"
#include "ballast/memory/machine.h"

namespace ballast::memory::memory_test {
namespace {

TEST(HostPool, PiecesArePageAlignedDisjointAndZero) {
  HostPool pool(3 * kPage);
  const HostBytes first = pool.allocate(100, "first");
  const HostBytes second = pool.allocate(kPage + 1, "second");
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(second.data()) % kPage, 0U);
  EXPECT_GE(second.data(), first.data() + kPage);
  for (const std::byte byte : second) EXPECT_EQ(byte, std::byte{0});
  EXPECT_EQ(pool.allocated(), 3 * kPage);
}

TEST(HostPool, AskingBeyondTheEndNamesThePiece) {
  HostPool pool(2 * kPage);
  try {
    pool.allocate(3 * kPage, "gradients");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::memory);
    EXPECT_NE(std::string(error.what()).find("gradients needs 12.0 KiB"), std::string::npos)
        << error.what();
  }
}

TEST(HostPool, ARefusedMappingNamesTheMemoryTheSizeAndTheKey) {
  try {
    const HostPool pool(Bytes{1} << 60U);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::memory);
    EXPECT_NE(error.error_number(), 0);
    const std::string text = error.what();
    EXPECT_NE(text.find("host memory (ballast.host_bytes): cannot map "), std::string::npos)
        << text;
    EXPECT_NE(text.find(format_bytes(Bytes{1} << 60U)), std::string::npos) << text;
  }
}

TEST(Ledger, AddsUpByTierAndKind) {
  Ledger ledger;
  ledger.add(Tier::nvme, "optimizer states", 100);
  ledger.add(Tier::device, "weights", 10);
  ledger.add(Tier::device, "weights", 5);
  ledger.add(Tier::host, "nothing", 0);
  ASSERT_EQ(ledger.lines().size(), 2U);
  EXPECT_EQ(ledger.lines()[0].tier, Tier::device);
  EXPECT_EQ(ledger.lines()[0].bytes, 15U);
  EXPECT_EQ(ledger.total(Tier::nvme), 100U);
  EXPECT_EQ(ledger.total(Tier::host), 0U);
}

TEST(Ledger, WhatDoesNotFitNamesTheTierTheLineAndTheGap) {
  Ledger ledger;
  ledger.add(Tier::host, "gradients", 3 * kMiB);
  ledger.add(Tier::host, "staging", 1 * kMiB);
  EXPECT_TRUE(ledger.fits({.device = 0, .host = 4 * kMiB}));
  EXPECT_NO_THROW(ledger.require_fit({.device = 0, .host = 4 * kMiB}));
  try {
    ledger.require_fit({.device = 0, .host = 2 * kMiB});
    FAIL();
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("host budget of 2.00 MiB is 2.00 MiB too small"), std::string::npos);
    EXPECT_NE(text.find("'gradients' (3.00 MiB)"), std::string::npos);
    EXPECT_NE(text.find("ballast.host_bytes"), std::string::npos);
  }
}

TEST(Ledger, EachDeviceMustFitItsBudget) {
  Ledger ledger;
  ledger.add(Tier::device, "weights", 3 * kMiB, 1);
  ledger.add(Tier::device, "weights", 1 * kMiB, 0);
  ledger.add(Tier::device, "workspace", 1 * kMiB, 0);
  ledger.add(Tier::device, "workspace", 1 * kMiB, 1);
  ledger.add(Tier::host, "states", 5 * kMiB);
  EXPECT_EQ(ledger.devices(), 2U);
  EXPECT_EQ(ledger.total(Tier::device), 6 * kMiB);
  EXPECT_EQ(ledger.device_total(0), 2 * kMiB);
  EXPECT_EQ(ledger.needed(Tier::device), 4 * kMiB);
  EXPECT_EQ(ledger.largest(Tier::device)->bytes, 3 * kMiB);
  EXPECT_TRUE(ledger.fits({.device = 4 * kMiB, .host = 5 * kMiB}));
  EXPECT_EQ(ledger.excess({.device = 1 * kMiB, .host = 4 * kMiB}), 5 * kMiB) << "1 + 3 + 1";
  try {
    ledger.require_fit({.device = 3 * kMiB, .host = 5 * kMiB});
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "the device budget of 3.00 MiB is 1.00 MiB too small for device 1 (one of 2): the "
                 "run needs 4.00 MiB; the largest part is 'weights' (3.00 MiB); "
                 "ballast.device_bytes sets the budget of each device");
  }
}

TEST(Ledger, EqualDevicesAreListedOnce) {
  Ledger ledger;
  for (const std::uint8_t device : {0, 1}) {
    ledger.add(Tier::device, "weights", kMiB + device, device);  // prints the same
  }
  const Budgets budgets = {.device = 2 * kMiB, .host = 0};
  EXPECT_EQ(ledger.table(budgets),
            (std::vector<std::string>{
                "device   weights              1.00 MiB",
                "device   total                1.00 MiB  of 2.00 MiB on each of 2 devices"}));
  ledger.add(Tier::device, "weights", kMiB, 1);
  EXPECT_EQ(ledger.table(budgets),
            (std::vector<std::string>{"device 0 weights              1.00 MiB",
                                      "device 0 total                1.00 MiB  of 2.00 MiB",
                                      "device 1 weights              2.00 MiB",
                                      "device 1 total                2.00 MiB  of 2.00 MiB"}));
}

TEST(Budgets, HostDevicesDivideThePartOfTheDeviceTier) {
  const Budgets both = resolve_budgets({}, 100, {}, 4);
  EXPECT_EQ(both.device, 10U);
  EXPECT_EQ(both.host, 40U);
  EXPECT_EQ(resolve_budgets({.device = 0, .host = 20}, 100, {}, 4).device, 15U);
  EXPECT_EQ(resolve_budgets({.device = 10, .host = 0}, 100, {}, 4).host, 40U);
  EXPECT_EQ(resolve_budgets({}, 100, {.free = 40}, 4).device, 30U) << "each GPU has its own memory";
}

TEST(Budgets, AutomaticOnesShareFourFifthsOfTheMemory) {
  const Budgets both = resolve_budgets({}, 100);
  EXPECT_EQ(both.device, 40U);
  EXPECT_EQ(both.host, 40U);
  EXPECT_EQ(resolve_budgets({.device = 30, .host = 0}, 100).host, 50U);
  EXPECT_EQ(resolve_budgets({.device = 90, .host = 0}, 100).host, 0U);
  EXPECT_EQ(resolve_budgets({.device = 70, .host = 70}, 100).host, 70U);
  const Budgets apart = resolve_budgets({}, 100, {.free = 40});
  EXPECT_EQ(apart.device, 30U) << "a quarter is for libraries";
  EXPECT_EQ(apart.host, 80U);
  EXPECT_EQ(resolve_budgets({}, 100, {.free = 24 * kGiB}).device, 24 * kGiB - 1536 * kMiB);
  EXPECT_EQ(resolve_budgets({}, 100, {.free = 140 * kGiB}).device, 133 * kGiB);
  EXPECT_EQ(resolve_budgets({}, 100, {.free = 24 * kGiB, .channels = 3}).device,
            24 * kGiB - 1536 * kMiB - 3 * kChannelBytes);
  EXPECT_EQ(resolve_budgets({}, 100, {.free = 140 * kGiB, .channels = 2}).device,
            133 * kGiB - 2 * kChannelBytes);
  EXPECT_EQ(library_reserve(24 * kGiB, 2), 1536 * kMiB + 2 * kChannelBytes);
  EXPECT_EQ(library_reserve(4 * kGiB, 4), 2 * kGiB) << "at most a quarter for channels";
  EXPECT_EQ(library_reserve(140 * kGiB), 1536 * kMiB) << "an explicit budget may be larger";
  EXPECT_EQ(library_reserve(4 * kGiB), kGiB);
  EXPECT_EQ(resolve_budgets({.device = 90, .host = 0}, 100, {.free = 40}).device, 90U);
  EXPECT_EQ(resolve_budgets({.device = 0, .host = 70}, 100, {.free = 40}).host, 70U);
}

TEST(Topology, TheMachineHasCoresAndNodes) {
  const Topology topology = read_topology();
  EXPECT_GE(topology.cores, 1);
  EXPECT_GE(topology.numa_nodes, 1);
  EXPECT_EQ(describe({.packages = 1, .numa_nodes = 1, .cores = 2, .last_level_cache = 32 * kMiB}),
            "2 cores, 1 NUMA node, 32.0 MiB L3");
}

TEST(Budgets, TheMachineHasSomeMemory) {
  EXPECT_GT(available_memory(), 16 * kMiB);
  EXPECT_GT(peak_resident_bytes(), 0U);
}

}  // namespace
}  // namespace ballast::memory::memory_test
