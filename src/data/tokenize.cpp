#include "ballast/data/tokenize.h"

#include <algorithm>
#include <bit>
#include <span>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::data {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::uint64_t kIdsAtATime = 1 << 20;

}  // namespace

void write_tokens(const TokenSource& source, const std::filesystem::path& path,
                  const text::OutputRule& rule, const std::atomic<bool>* interrupted) {
  text::OutputFile file(path, rule);
  std::vector<std::int32_t> ids;
  std::vector<std::uint16_t> packed;
  for (std::uint64_t done = 0; done < source.size(); done += ids.size()) {
    if (interrupted != nullptr && *interrupted) {
      throw Error(ErrorCategory::interrupted, "interrupted");
    }
    ids.resize(std::min(kIdsAtATime, source.size() - done));
    source.read(done, ids);
    packed.resize(ids.size());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] < 0 || ids[i] > 0xffff) {
        throw Error(
            ErrorCategory::data,
            fmt::format("token {} has id {}, which does not fit 16 bits", done + i, ids[i]));
      }
      packed[i] = static_cast<std::uint16_t>(ids[i]);
    }
    file.write(std::as_bytes(std::span(packed)));
  }
  file.commit();
}

}  // namespace ballast::data
