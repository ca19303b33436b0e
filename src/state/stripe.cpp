#include "ballast/state/stripe.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ballast/core/error.h"

namespace ballast::state {

Stripe::Stripe(std::span<const Bytes> extents, std::span<const double> weights, Bytes segment_bytes)
    : weights_(weights.begin(), weights.end()),
      segment_bytes_(segment_bytes),
      file_bytes_(weights.size(), 0) {
  expects(!weights.empty(), "stripe: at least 1 path is needed");
  for (const double weight : weights) {
    expects(weight > 0.0 && std::isfinite(weight), "stripe: weights must be finite and above 0");
  }
  const Bytes segment = round_up(std::max<Bytes>(segment_bytes, 1), kChunk);
  const auto load_with_another = [&](std::size_t path) {
    return static_cast<double>(file_bytes_[path] + segment) / weights[path];
  };
  for (const Bytes asked : extents) {
    Extent extent{
        .bytes = round_up(asked, kPage), .first_chunk = chunks_, .first_segment = segments_.size()};
    for (Bytes start = 0; start < extent.bytes; start += segment) {
      std::size_t path = 0;
      for (std::size_t p = 1; p < weights.size(); ++p) {
        if (load_with_another(p) < load_with_another(path)) path = p;
      }
      const Bytes bytes = std::min(segment, extent.bytes - start);
      segments_.push_back({path, file_bytes_[path], start, bytes});
      file_bytes_[path] += bytes;
      ++extent.segments;
    }
    chunks_ += (extent.bytes + kChunk - 1) / kChunk;
    extents_.push_back(extent);
  }
}

std::span<const Segment> Stripe::segments(std::size_t extent) const {
  const Extent& found = extents_.at(extent);
  return std::span(segments_).subspan(found.first_segment, found.segments);
}

std::size_t Stripe::first_chunk(std::size_t extent) const {
  return extents_.at(extent).first_chunk;
}

Bytes Stripe::bytes() const {
  return std::accumulate(file_bytes_.begin(), file_bytes_.end(), Bytes{0});
}

}  // namespace ballast::state
