#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/comm/communicator.h"

#include "tests/conformance/comm_lane.h"

// Sums of terms in the order of members and numbers. Run as comm_test.cpp.

namespace ballast::comm::comm_test {
namespace {

/// The elements of an OrderedSum, by a plain loop over the terms of all ranks.
Content expected_ordered_sum(const OrderedSum& sum, const Content& first,
                             const std::vector<Content>& terms) {
  const Bytes width = size_of(sum.term_type);
  std::vector<std::pair<std::uint32_t, std::uint32_t>> order;
  for (std::uint32_t rank = 0; rank < terms.size(); ++rank) {
    for (std::uint32_t t = 0; t < sum.terms; ++t) order.emplace_back(rank, t);
  }
  if (sum.descending) std::ranges::reverse(order);
  Content expected(sum.bytes());
  for (std::uint64_t e = 0; e < sum.elements; ++e) {
    float total = first.empty() ? 0.0F : element(first, e * size_of(sum.type), sum.type);
    bool begun = !first.empty();
    for (const auto& [rank, t] : order) {
      const float term = element(terms[rank], (t * sum.elements + e) * width, sum.term_type);
      total = begun ? total + term : term;
      begun = true;
    }
    const Bf16 rounded = to_bf16(total);
    std::memcpy(expected.data() + e * size_of(sum.type),
                sum.type == DType::f32 ? static_cast<const void*>(&total) : &rounded,
                size_of(sum.type));
  }
  return expected;
}

void expect_ordered_sum(const Lane& lane, const OrderedSum& sum, bool has_first) {
  const std::uint32_t world = World::ranks().world();
  const Content first = has_first ? content_of(99, sum.bytes(), sum.type, sum.terms) : Content();
  std::vector<Content> terms;
  for (std::uint32_t rank = 0; rank < world; ++rank) {
    terms.push_back(content_of(rank, sum.bytes_of_terms(), sum.term_type, sum.terms));
    // Zeros keep their sign, and other ranks' NaNs and infinities arrive.
    const float special[] = {-0.0F, rank == 0 ? std::nanf("") : 1.0F, -INFINITY};
    for (std::size_t i = 0; i < std::size(special) && i < sum.elements; ++i) {
      const Bf16 rounded = to_bf16(special[i]);
      std::memcpy(terms.back().data() + i * size_of(sum.term_type),
                  sum.term_type == DType::f32 ? static_cast<const void*>(&special[i]) : &rounded,
                  size_of(sum.term_type));
    }
  }
  const Content expected = expected_ordered_sum(sum, first, terms);
  const DeviceBytes own = lane.filled(terms[World::ranks().rank()]);
  const DeviceBytes begin = has_first ? lane.filled(first) : DeviceBytes();
  const DeviceBytes out = lane.filled(Content(sum.bytes() + 64, std::byte{0x5a}));
  const DeviceBytes scratch = lane.scratch(round_up(sum.scratch(world), kPage) / kPage);
  lane.channel->sum_terms(*lane.stream, sum, own, begin, out.subview(0, sum.bytes()), scratch);
  lane.stream->synchronize();
  const Content found = lane.read(out);
  const std::string about = "elements " + std::to_string(sum.elements) + ", terms " +
                            std::to_string(sum.terms) + (sum.descending ? ", descending" : "") +
                            (has_first ? ", with a first term" : "");
  for (std::uint64_t e = 0; e < sum.elements; ++e) {
    const Bytes at = e * size_of(sum.type);
    const float got = element(found, at, sum.type);
    const float wanted = element(expected, at, sum.type);
    if (std::isnan(wanted) && std::isnan(got)) continue;
    const bool same =
        std::equal(found.begin() + static_cast<std::ptrdiff_t>(at),
                   found.begin() + static_cast<std::ptrdiff_t>(at + size_of(sum.type)),
                   expected.begin() + static_cast<std::ptrdiff_t>(at));
    if (same) continue;
    ADD_FAILURE() << about << ": element " << e << " is " << got << ", not " << wanted;
    break;
  }
  const Content guard = slice(found, sum.bytes(), 64);
  EXPECT_EQ(guard, Content(64, std::byte{0x5a})) << about;
  EXPECT_TRUE(lane.guard_holds(scratch)) << about;
}

TEST_F(Comm, SumsOfTermsAddThemInTheOrderOfMembersAndNumbers) {
  const Lane lane("test-terms");
  for (const std::uint64_t elements : {1U, 63U, 64U, 1000U, 20011U}) {
    for (const std::uint32_t terms : {1U, 2U}) {
      for (const DType type : {DType::bf16, DType::f32}) {
        for (const bool descending : {false, true}) {
          const OrderedSum sum = {
              .elements = elements, .terms = terms, .type = type, .descending = descending};
          expect_ordered_sum(lane, sum, !descending);
          if (terms == 2) continue;
          expect_ordered_sum(lane, {.elements = elements, .term_type = type, .type = type}, false);
        }
      }
    }
  }
}

}  // namespace
}  // namespace ballast::comm::comm_test
