#include "src/checkpoint/states_writer.h"

#include <algorithm>
#include <utility>

#include "src/checkpoint/format.h"

namespace ballast::checkpoint {

StatesWriter::StatesWriter(const std::filesystem::path& path, Bytes size) : file_(path, size) {
  chunk_.reserve(kCheckpointChunk);
}

void StatesWriter::write(ConstHostBytes bytes) {
  while (!bytes.empty()) {
    const Bytes count = std::min(bytes.size(), kCheckpointChunk - chunk_.size());
    chunk_.insert(chunk_.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(count));
    bytes = bytes.subspan(count);
    if (chunk_.size() == kCheckpointChunk) pass_on();
  }
}

text::Json StatesWriter::finish() {
  if (!chunk_.empty()) pass_on();
  file_.commit();
  return std::move(checksums_);
}

void StatesWriter::pass_on() {
  checksums_.push_back(checksum_text(chunk_));
  file_.write(written_, chunk_);
  written_ += chunk_.size();
  chunk_.clear();
}

}  // namespace ballast::checkpoint
