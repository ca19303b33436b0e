#include "src/data/data_content.h"

#include <algorithm>
#include <span>

#include <fcntl.h>
#include <fmt/format.h>

#include "ballast/core/descriptor.h"
#include "ballast/core/error.h"
#include "ballast/core/units.h"
#include "ballast/state/checksum.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

namespace ballast::data {
namespace {

namespace fs = std::filesystem;

constexpr Bytes kSample = 64 * kKiB;
constexpr std::uint64_t kMostSamples = 256;

/// The files concatenated.
class Joined {
 public:
  explicit Joined(const std::vector<fs::path>& files) : files_(files) {
    for (const fs::path& path : files) {
      const Descriptor file = text::open_file(path, O_RDONLY, ErrorCategory::data);
      sizes_.push_back(text::regular_file_size(file, path, ErrorCategory::data));
      bytes_ += sizes_.back();
    }
  }

  [[nodiscard]] Bytes bytes() const { return bytes_; }
  [[nodiscard]] const std::vector<Bytes>& sizes() const { return sizes_; }

  void read(Bytes offset, HostBytes out) const {
    for (std::size_t f = 0; f < files_.size() && !out.empty(); ++f) {
      if (offset >= sizes_[f]) {
        offset -= sizes_[f];
        continue;
      }
      const Bytes count = std::min<Bytes>(out.size(), sizes_[f] - offset);
      const Descriptor file = text::open_file(files_[f], O_RDONLY, ErrorCategory::data);
      text::read_fully(file, files_[f], offset, out.first(count));
      out = out.subspan(count);
      offset = 0;
    }
  }

 private:
  const std::vector<fs::path>& files_;
  std::vector<Bytes> sizes_;
  Bytes bytes_ = 0;
};

}  // namespace

std::string describe_content(const std::vector<fs::path>& files, std::uint64_t tokens) {
  const Joined data(files);
  state::RunningChecksum hash;
  hash.add(std::as_bytes(std::span(data.sizes())));
  std::vector<std::byte> piece;
  const bool whole = data.bytes() <= kMostSamples * kSample;
  const std::uint64_t pieces = whole ? (data.bytes() + kSample - 1) / kSample : kMostSamples;
  for (std::uint64_t p = 0; p < pieces; ++p) {
    // Each piece begins at p / 255 of the last beginning. The form avoids overflow for large files.
    const Bytes last = data.bytes() - std::min(kSample, data.bytes());
    const Bytes spread =
        last / (kMostSamples - 1) * p + last % (kMostSamples - 1) * p / (kMostSamples - 1);
    const Bytes begin = whole ? p * kSample : spread;
    piece.resize(std::min(kSample, data.bytes() - begin));
    data.read(begin, piece);
    hash.add(piece);
  }
  return fmt::format("{} file{}, {}, {} tokens, XXH3 {:016x}", files.size(),
                     files.size() == 1 ? "" : "s", format_bytes(data.bytes()), tokens,
                     hash.digest());
}

config::Settings settings_of_run(const config::Config& config, const std::vector<fs::path>& files,
                                 std::uint64_t tokens) {
  config::Settings settings = config::settings_of(config);
  settings[fmt::format("data.{}", config.data.kind())] =
      text::Json(describe_content(files, tokens)).compact();
  return settings;
}

}  // namespace ballast::data
