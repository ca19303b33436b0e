#include "ballast/state/swap_file.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <algorithm>
#include <exception>
#include <utility>

#include <xxhash.h>

#include "ballast/core/error.h"

namespace ballast::state {
namespace {

/// Unit of checksums and of requests.
constexpr Bytes kChunk = 1 * kMiB;

HostBytes chunk_of(HostBytes data, std::size_t index) {
  const std::size_t start = index * kChunk;
  return data.subspan(start, std::min<std::size_t>(kChunk, data.size() - start));
}

std::size_t chunk_count(Bytes bytes) {
  return (bytes + kChunk - 1) / kChunk;
}

/// Waits for all tickets, hands each completion to `then`, and throws the first failure last, when
/// no transfer can touch the caller's memory any more.
template <class Then>
void finish_all(aio::Queue& queue, const std::vector<aio::Ticket>& tickets, std::string_view stage,
                Then then) {
  std::exception_ptr failure;
  for (std::size_t i = 0; i < tickets.size(); ++i) {
    const aio::Completion completion = queue.wait(tickets[i]);
    try {
      completion.check(stage);
      if (!failure) then(i);
    } catch (const Error&) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace

SwapFile::SwapFile(const std::filesystem::path& directory, Bytes bytes,
                   const aio::QueueOptions& options)
    : SwapFile(aio::File::create_anonymous(directory, round_up(bytes, kPage)),
               aio::make_queue(options)) {}

SwapFile::SwapFile(aio::File file, std::unique_ptr<aio::Queue> queue)
    : capacity_(file.size()), file_(std::move(file)), queue_(std::move(queue)) {}

SwapFile::~SwapFile() = default;

Extent SwapFile::allocate(Bytes bytes) {
  const Bytes size = round_up(bytes, kPage);
  expects(size <= capacity_ - allocated_, "swap file: allocation past the end");
  const Extent extent{allocated_, size, seals_.size()};
  allocated_ += size;
  seals_.resize(seals_.size() + chunk_count(size));
  return extent;
}

void SwapFile::write(const Extent& extent, HostBytes data, std::uint64_t version) {
  expects(data.size() <= extent.bytes, "swap file: writing past the extent");
  std::vector<aio::Ticket> tickets;
  for (std::size_t i = 0; i < chunk_count(data.size()); ++i) {
    const HostBytes chunk = chunk_of(data, i);
    seals_[extent.first_chunk + i] = {XXH3_64bits(chunk.data(), chunk.size()), version, true};
    tickets.push_back(
        queue_->submit({aio::Direction::write, &file_, extent.offset + i * kChunk, Lease(chunk)}));
  }
  finish_all(*queue_, tickets, "writeback", [](std::size_t) {});
}

void SwapFile::read(const Extent& extent, HostBytes data, std::uint64_t version) {
  expects(data.size() <= extent.bytes, "swap file: reading past the extent");
  std::vector<aio::Ticket> tickets;
  for (std::size_t i = 0; i < chunk_count(data.size()); ++i) {
    tickets.push_back(queue_->submit(
        {aio::Direction::read, &file_, extent.offset + i * kChunk, Lease(chunk_of(data, i))}));
  }
  finish_all(*queue_, tickets, "fetch",
             [&](std::size_t i) { verify(extent, i, chunk_of(data, i), version); });
}

void SwapFile::verify(const Extent& extent, std::size_t chunk, HostBytes data,
                      std::uint64_t version) const {
  const Seal& seal = seals_[extent.first_chunk + chunk];
  const Bytes offset = extent.offset + chunk * kChunk;
  if (!seal.written || seal.version != version) {
    throw Error(ErrorCategory::state,
                fmt::format("fetch: swap file in {} offset={} holds version {}, version {} was "
                            "wanted",
                            file_.name(), offset,
                            seal.written ? std::to_string(seal.version) : "none", version));
  }
  if (XXH3_64bits(data.data(), data.size()) != seal.checksum) {
    throw Error(ErrorCategory::state,
                fmt::format("fetch: swap file in {} offset={} length={}: checksum mismatch, the "
                            "disk returned other bytes than were written; check the drive",
                            file_.name(), offset, data.size()));
  }
}

}  // namespace ballast::state
