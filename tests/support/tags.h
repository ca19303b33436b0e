#pragma once

#include <string_view>

namespace ballast::test {

/// A fact about tests by which runs choose them: `--tagged=TAG` and `--untagged=TAG,TAG` of a test
/// program, which also reads BALLAST_TEST_UNTAGGED. `patterns` are those of --gtest_filter, joined
/// by ':'. A program in which one of them matches no test fails. The tags:
/// - slow_sanitized: takes minutes under a sanitizer, and other tests run the same code;
/// - one_thread: has one thread, so that the thread sanitizer finds nothing in it;
/// - slow_scalar: takes most of the time with the kernels of older CPUs, where smaller shapes
/// suffice;
/// - emulated, slow_emulated: fast enough on the emulated GPU, or not;
/// - small_shapes: a kind of kernel at a small shape, for watched and randomised kernels;
/// - 2_ranks, 3_ranks, 4_ranks, and the same with _emulated: runs with this number of ranks.
struct Tag {
  /// `tags` are joined by ','.
  Tag(std::string_view tags, std::string_view patterns);
};

}  // namespace ballast::test

#define BALLAST_TAG_JOINED(a, b) a##b
#define BALLAST_TAG_NAME(number) BALLAST_TAG_JOINED(tag_, number)
/// Tags tests, next to them.
#define TAG_TESTS(tags, patterns) \
  const ::ballast::test::Tag BALLAST_TAG_NAME(__COUNTER__)(tags, patterns)
