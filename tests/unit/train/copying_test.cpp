#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/train/model_folder.h"
#include "ballast/train/safetensors.h"
#include "ballast/train/weight_files.h"

#include "src/train/read_ahead.h"
#include "src/train/write_behind.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/train/expect_error.h"
#include "tests/unit/train/file_size_limit.h"

namespace ballast::train {
namespace {

namespace fs = std::filesystem;
using test::expect_error;

/// More than a ring of buffers holds.
constexpr Bytes kLarge = 11 * ReadAhead::kPiece + 12345;

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
  ConstHostBytes left = bytes_of(wanted);
  for (Bytes size = 1; !left.empty(); size = size * 3 + 1) {
    file.write(left.first(std::min(size, left.size())));
    left = left.subspan(std::min(size, left.size()));
  }
  EXPECT_FALSE(fs::exists(dir.path() / "a"));
  file.commit();
  EXPECT_TRUE(read_small_file(dir.path() / "a") == wanted);
}

TEST(WriteBehind, ReportsAFailureOfItsThread) {
  const test::TempDir dir;
  const std::string bytes = pattern(kLarge);
  for (const Bytes limit : {ReadAhead::kPiece + 1, kLarge - 1}) {
    WriteBehind file(dir.path() / "a", bytes.size());
    const test::FileSizeLimit smaller(limit);
    expect_error(ErrorCategory::io, {"cannot write", (dir.path() / "a: File too large").native()},
                 [&] {
                   file.write(bytes_of(bytes));
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
  [[nodiscard]] static std::vector<StoredPiece> cut(const WeightFiles& files) {
    std::vector<StoredPiece> pieces;
    const WeightFiles::Place& place = files.tensors().front();
    for (Bytes at = 0; at < place.tensor->bytes; at += ReadAhead::kPiece) {
      pieces.push_back({&place, at, std::min(ReadAhead::kPiece, place.tensor->bytes - at)});
    }
    return pieces;
  }
  test::TempDir dir;
  std::string bytes;
  fs::path path;
};

TEST(ReadAhead, DeliversPiecesInOrder) {
  const OneTensor file;
  const WeightFiles files(file.path);
  const auto pieces = OneTensor::cut(files);
  ASSERT_GT(pieces.size(), BufferRing::kBuffers);
  ReadAhead reader(pieces);
  for (const StoredPiece& piece : pieces) {
    const ConstHostBytes read = reader.next();
    ASSERT_EQ(read.size(), piece.bytes);
    EXPECT_EQ(std::memcmp(read.data(), file.bytes.data() + piece.first, read.size()), 0);
  }
}

TEST(ReadAhead, NamesAFileThatWasCutOff) {
  const OneTensor file;
  const WeightFiles files(file.path);
  fs::resize_file(file.path, fs::file_size(file.path) - 1);
  const auto pieces = OneTensor::cut(files);
  ReadAhead reader(pieces);
  expect_error(ErrorCategory::data, {file.path.native(), "1 bytes too early", "truncated"}, [&] {
    for (std::size_t i = 0; i < pieces.size(); ++i) reader.next();
  });
}

TEST(ReadAhead, StopsEarly) {
  const OneTensor file;
  const WeightFiles files(file.path);
  ReadAhead reader(OneTensor::cut(files));
  EXPECT_FALSE(reader.next().empty());
}

}  // namespace
}  // namespace ballast::train
