#include <cstdint>
#include <map>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

#include "ballast/core/error.h"
#include "ballast/state/checksum.h"

#include "src/checkpoint/checkpoint.h"

namespace ballast::checkpoint {
namespace {

namespace fs = std::filesystem;
using engine::StateKind;
using engine::StateRange;

CheckpointContent content_of(const Checkpoint& checkpoint) {
  CheckpointContent content = {
      .facts = checkpoint.facts(), .portable = checkpoint.portable(), .ranks = checkpoint.ranks()};
  std::map<std::pair<StateKind, Bytes>, Elems> entries;
  for (const StateRange& range : checkpoint.whole_ranges()) {
    entries[{range.kind, range.width}] += range.count;
  }
  for (const auto& [array, count] : entries) {
    content.states.push_back({std::string(to_string(array.first)), array.second, count});
  }
  for (fs::path& path : checkpoint.files()) {
    std::error_code error;
    const Bytes bytes = fs::file_size(path, error);
    content.files.push_back({std::move(path), error ? 0 : bytes});
  }
  return content;
}

std::uint64_t hash_of(const Checkpoint& checkpoint, const std::function<void(Bytes)>& progress) {
  CheckedStates states(checkpoint);
  std::vector<std::uint64_t> digests;
  for (const StateRange& range : checkpoint.whole_ranges()) {
    state::RunningChecksum hash;
    states.read(range, [&](ConstHostBytes bytes) {
      hash.add(bytes);
      progress(bytes.size());
    });
    digests.push_back(hash.digest());
  }
  return engine::hash_with_biases(state::checksum(std::as_bytes(std::span(digests))),
                                  checkpoint.facts().correction_biases);
}

}  // namespace

Bytes CheckpointContent::bytes() const {
  Bytes sum = 0;
  for (const CheckpointFile& file : files) sum += file.bytes;
  return sum;
}

CheckpointReport examine_checkpoint(const fs::path& folder, const CheckpointQuestions& questions,
                                    const std::function<void(Bytes done, Bytes total)>& progress) {
  CheckpointReport report = {.folder = folder};
  try {
    const Checkpoint checkpoint(folder);
    report.content = content_of(checkpoint);
    Bytes done = 0;
    const auto add = [&](Bytes bytes) {
      done += bytes;
      progress(done, report.content->bytes());
    };
    // The states are everything but the files' heads, which are checked when the files are opened.
    if (questions.hash) {
      report.hash = hash_of(checkpoint, add);
    } else if (questions.whole) {
      checkpoint.verify(0, 1, add);
    }
  } catch (const Error& error) {
    if (error.category() != ErrorCategory::data && error.category() != ErrorCategory::io) throw;
    (error.category() == ErrorCategory::data ? report.damage : report.unreadable) = error.what();
  }
  return report;
}

}  // namespace ballast::checkpoint
