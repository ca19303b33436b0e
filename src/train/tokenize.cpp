#include "ballast/train/tokenize.h"

#include <algorithm>
#include <bit>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include "ballast/core/error.h"

#include "src/train/posix_file.h"

namespace ballast::train {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::uint64_t kPiece = 1 << 20;

void copy_tokens(const TokenSource& source, const Descriptor& file,
                 const std::filesystem::path& path) {
  std::vector<std::int32_t> ids;
  std::vector<std::uint16_t> packed;
  for (std::uint64_t done = 0; done < source.size(); done += ids.size()) {
    ids.resize(std::min(kPiece, source.size() - done));
    source.read(done, ids);
    packed.resize(ids.size());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] < 0 || ids[i] > 0xffff) {
        throw Error(ErrorCategory::data,
                    fmt::format("token {} has id {}, which 16 bits do not hold", done + i, ids[i]));
      }
      packed[i] = static_cast<std::uint16_t>(ids[i]);
    }
    write_fully(file, path, std::as_bytes(std::span(packed)));
  }
}

}  // namespace

void write_tokens(const TokenSource& source, const std::filesystem::path& path) {
  const std::filesystem::path partial = fmt::format("{}.tmp-{}", path.string(), getpid());
  try {
    const Descriptor file = open_file(partial, O_WRONLY | O_CREAT | O_TRUNC, ErrorCategory::io);
    copy_tokens(source, file, partial);
    sync_file(file, partial);
    std::filesystem::rename(partial, path);
  } catch (const std::filesystem::filesystem_error& error) {
    std::error_code ignored;
    std::filesystem::remove(partial, ignored);
    throw Error(ErrorCategory::io, fmt::format("cannot write {}", path.string()),
                error.code().value());
  } catch (...) {
    std::error_code ignored;
    std::filesystem::remove(partial, ignored);
    throw;
  }
}

}  // namespace ballast::train
