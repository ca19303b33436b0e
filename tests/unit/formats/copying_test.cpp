#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/formats/model_folder.h"
#include "ballast/formats/safetensors.h"
#include "ballast/formats/weight_files.h"

#include "src/formats/read_ahead.h"
#include "src/formats/write_behind.h"
#include "tests/support/expect_error.h"
#include "tests/support/file_size_limit.h"
#include "tests/support/temp_dir.h"

namespace ballast::formats::copying_test {
namespace {

namespace fs = std::filesystem;
using test::expect_error;

/// More than all buffers hold; not whole pages.
constexpr Bytes kLarge = 88 * kMiB + 12345;

std::string pattern(Bytes size) {
  std::string bytes(size, '\0');
  std::uint32_t state = 1;
  for (char& byte : bytes) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<char>(state >> 24);
  }
  return bytes;
}

ConstHostBytes bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

TEST(WriteBehind, WritesAllBytesInOrder) {
  const test::TempDir dir;
  const std::string wanted = pattern(kLarge);
  WriteBehind file(dir.path() / "a", wanted.size());
  const ConstHostBytes bytes = bytes_of(wanted);
  Bytes at = 0;
  for (Bytes size = 1; at < bytes.size(); size = size * 3 + 1) {
    const Bytes count = std::min(size, bytes.size() - at);
    file.write(at, bytes.subspan(at, count));
    at += count;
  }
  EXPECT_FALSE(fs::exists(dir.path() / "a"));
  file.commit();
  EXPECT_TRUE(read_small_file(dir.path() / "a") == wanted);
}

/// Writes pieces of all sizes, in any order, of two files in turn.
TEST(WriteBehind, WritesPiecesOfSeveralFilesInAnyOrder) {
  struct Piece {
    std::size_t file;
    Bytes at;
    Bytes size;
  };
  const test::TempDir dir;
  const std::string wanted = pattern(kLarge);
  std::mt19937 random(1);
  std::vector<Piece> pieces;
  for (const std::size_t file : {0, 1}) {
    for (Bytes at = 0; at < wanted.size(); at += pieces.back().size) {
      // Short pieces, and long ones that begin and end anywhere.
      const Bytes size = random() % 3 > 0 ? random() % 5000 + 1 : random() % (6 * kMiB) + 1;
      pieces.push_back({file, at, std::min(size, wanted.size() - at)});
    }
  }
  for (std::size_t i = pieces.size(); --i > 0;) {
    // Some of them follow the previous one.
    if (random() % 4 > 0) std::swap(pieces[i], pieces[random() % i]);
  }
  const auto buffers = std::make_shared<WriteBuffers>();
  WriteBehind first(dir.path() / "0", wanted.size(), buffers);
  WriteBehind second(dir.path() / "1", wanted.size(), buffers);
  for (const Piece& piece : pieces) {
    WriteBehind& file = piece.file == 0 ? first : second;
    file.write(piece.at, bytes_of(wanted).subspan(piece.at, piece.size));
  }
  second.commit();
  first.commit();
  for (const char* name : {"0", "1"}) EXPECT_TRUE(read_small_file(dir.path() / name) == wanted);
}

TEST(WriteBehind, EndsRequestsForAllFilesWhenOneIsAbandoned) {
  const test::TempDir dir;
  const std::string bytes = pattern(kLarge);
  const auto buffers = std::make_shared<WriteBuffers>();
  WriteBehind other(dir.path() / "other", bytes.size(), buffers);
  {
    WriteBehind file(dir.path() / "a", bytes.size(), buffers);
    file.write(0, bytes_of(bytes));
  }
  expect_error(ErrorCategory::io, {"cannot write", "other"}, [&] {
    other.write(0, bytes_of(bytes));
    other.commit();
  });
  EXPECT_FALSE(fs::exists(dir.path() / "a"));
}

TEST(WriteBehind, ReportsAFailureOfAnEarlierWrite) {
  const test::TempDir dir;
  const std::string bytes = pattern(kLarge);
  for (const Bytes limit : {8 * kMiB + 1, kLarge - 1}) {
    WriteBehind file(dir.path() / "a", bytes.size());
    const test::FileSizeLimit smaller(limit);
    expect_error(ErrorCategory::io, {"cannot write", (dir.path() / "a: File too large").native()},
                 [&] {
                   file.write(0, bytes_of(bytes));
                   file.commit();
                 });
  }
  EXPECT_TRUE(fs::is_empty(dir.path()));
}

TEST(WriteBehind, TakesItsSpaceAtOnce) {
  const test::TempDir dir;
  const test::FileSizeLimit limit(kLarge - 1);
  expect_error(ErrorCategory::io, {"cannot write", "File too large"},
               [&] { WriteBehind(dir.path() / "a", kLarge); });
  EXPECT_TRUE(fs::is_empty(dir.path()));
}

/// A file of one tensor of bytes, which begins at an odd place.
struct OneTensor {
  OneTensor() : bytes(pattern(kLarge)) {
    std::string header = R"({"w":{"dtype":"U8","shape":[)" + std::to_string(bytes.size()) +
                         R"(],"data_offsets":[0,)" + std::to_string(bytes.size()) + "]}}";
    header.resize(header.size() % 2 == 0 ? header.size() + 1 : header.size(), ' ');
    const std::uint64_t length = header.size();
    std::string prefix(sizeof(length), '\0');
    std::memcpy(prefix.data(), &length, sizeof(length));
    path = dir.write("model.safetensors", prefix + header + bytes);
  }
  test::TempDir dir;
  std::string bytes;
  fs::path path;
};

/// Reads [first, last) in parts of several sizes, as one thread does.
void read_and_compare(ReadAhead& reader, const WeightFiles& files, const std::string& expected,
                      Bytes first, Bytes last) {
  std::vector<std::byte> part;
  for (Bytes size = 1; first < last; size = std::min(size * 5 + 1, 9 * kMiB)) {
    part.resize(std::min(size, last - first));
    reader.read(files.tensors().front(), first, part);
    ASSERT_EQ(std::memcmp(part.data(), expected.data() + first, part.size()), 0) << first;
    first += part.size();
  }
}

TEST(ReadAhead, DeliversAnyPartsInAnyOrder) {
  const OneTensor file;
  const WeightFiles files(file.path);
  ReadAhead reader(files.files(), {});
  read_and_compare(reader, files, file.bytes, 0, kLarge);
  // Reads backwards, forwards by less and by more than what is read ahead, and the last byte.
  for (const Bytes first : {3 * kMiB, 3 * kMiB + 5, 9 * kMiB, 60 * kMiB, Bytes{0}, kLarge - 1}) {
    read_and_compare(reader, files, file.bytes, first, std::min(first + 100, kLarge));
  }
}

/// Reads tensors of all sizes that begin anywhere.
TEST(ReadAhead, ContinuesWithTheNextTensorOfTheOrder) {
  const test::TempDir dir;
  const std::vector<Bytes> sizes = {5 * kMiB + 3, 300 * kKiB, 7, 13 * kMiB, 4 * kMiB + 1, kMiB};
  std::string header = "{";
  Bytes end = 0;
  for (std::size_t t = 0; t < sizes.size(); ++t) {
    header += (t == 0 ? "\"" : ",\"") + std::to_string(t) + R"(":{"dtype":"U8","shape":[)" +
              std::to_string(sizes[t]) + R"(],"data_offsets":[)" + std::to_string(end) + "," +
              std::to_string(end + sizes[t]) + "]}";
    end += sizes[t];
  }
  header += "}";
  const std::uint64_t length = header.size();
  std::string prefix(sizeof(length), '\0');
  std::memcpy(prefix.data(), &length, sizeof(length));
  const std::string bytes = pattern(end);
  const WeightFiles files(dir.write("model.safetensors", prefix + header + bytes));
  const Bytes data = sizeof(length) + header.size();
  for (const std::vector<const char*>& names :
       {std::vector{"0", "1", "2", "3", "4", "5"}, std::vector{"3", "0", "5", "2", "4", "1"}}) {
    std::vector<const WeightPlace*> order;
    for (const char* name : names) order.push_back(files.find(name));
    std::vector<ReadAhead::Source> sources;
    for (const WeightPlace* const place : order) {
      // The rows of a tensor may be in two blocks.
      const Bytes half = place->tensor->bytes / 2;
      sources.push_back({place, 0, half});
      sources.push_back({place, half, place->tensor->bytes});
    }
    ReadAhead reader(files.files(), sources);
    std::vector<const WeightPlace*> reads = order;
    reads.insert(reads.end(), {order[4], order[1], order[0]});  // not in the order
    for (const WeightPlace* const place : reads) {
      std::vector<std::byte> part;
      for (Bytes at = 0; at < place->tensor->bytes; at += part.size()) {
        part.resize(std::min<Bytes>(100'003, place->tensor->bytes - at));
        reader.read(*place, at, part);
        ASSERT_EQ(
            std::memcmp(part.data(), bytes.data() + place->tensor->offset - data + at, part.size()),
            0)
            << place->tensor->name << " at " << at;
      }
    }
  }
}

TEST(ReadAhead, ServesSeveralThreads) {
  const OneTensor file;
  const WeightFiles files(file.path);
  ReadAhead reader(files.files(), {});
  std::vector<std::thread> threads;
  constexpr std::size_t kThreads = 20;  // more than there are windows
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      read_and_compare(reader, files, file.bytes, kLarge * t / kThreads,
                       kLarge * (t + 1) / kThreads);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

/// Reads as the threads of the fill do.
TEST(ReadAhead, ThreadsThatTakeTurnsReadEverythingOnce) {
  const OneTensor file;
  const WeightFiles files(file.path);
  const WeightPlace& place = files.tensors().front();
  const ReadAhead::Source whole = {&place, 0, place.tensor->bytes};
  ReadAhead reader(files.files(), {whole, whole});
  constexpr Bytes kPart = 100'003;
  for (int round = 1; round <= 2; ++round) {
    std::atomic<Bytes> next = 0;
    const auto take_turns = [&] {
      std::vector<std::byte> part;
      for (Bytes at = next.fetch_add(kPart); at < kLarge; at = next.fetch_add(kPart)) {
        part.resize(std::min(kPart, kLarge - at));
        reader.read(place, at, part);
        EXPECT_EQ(std::memcmp(part.data(), file.bytes.data() + at, part.size()), 0) << at;
      }
    };
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) threads.emplace_back(take_turns);
    for (std::thread& thread : threads) thread.join();
  }
  // The second round begins where the first one ends, with what was read ahead of it.
  EXPECT_LE(reader.bytes_read(), 2 * (kLarge + 2 * kPage));
  EXPECT_GE(reader.bytes_read(), 2 * (kLarge - kPage));
}

TEST(ReadAhead, NamesAFileThatWasCutOff) {
  const OneTensor file;
  const WeightFiles files(file.path);
  std::vector<std::byte> all(kLarge);
  const auto cut = [&](Bytes from_end) {
    fs::resize_file(file.path, fs::file_size(file.path) - from_end);
  };
  const auto expect_cut = [&](ReadAhead& reader) {
    expect_error(ErrorCategory::data, {file.path.native(), "too early", "truncated"},
                 [&] { reader.read(files.tensors().front(), 0, all); });
  };
  ReadAhead opened_before(files.files(), {});
  cut(1);
  ReadAhead opened_after(files.files(), {});
  expect_cut(opened_after);
  cut(20 * kMiB);
  expect_cut(opened_before);
}

TEST(ReadAhead, StopsEarly) {
  const OneTensor file;
  const WeightFiles files(file.path);
  ReadAhead reader(files.files(), {});
  read_and_compare(reader, files, file.bytes, 0, 1);
}

}  // namespace
}  // namespace ballast::formats::copying_test
