#include "src/python/shared_file.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include <fmt/format.h>
#include <sys/stat.h>

#include "ballast/core/error.h"
#include "ballast/core/units.h"

namespace ballast::python {
namespace {

using Access = aio::File::Access;
using Handle = std::shared_ptr<const aio::File>;

Bytes size_now(const aio::File& file) {
  struct stat status {};
  if (fstat(file.descriptor(), &status) == 0) return static_cast<Bytes>(status.st_size);
  throw Error(ErrorCategory::io, file.name() + ": cannot read the file's status", errno);
}

bool is_direct(const aio::File& file) {
  return file.alignment() > 1;
}

/// Null if the file system has no direct I/O for whole pages.
Handle direct_twin(const aio::File& file, bool writable) {
  try {
    aio::File twin = file.reopened(writable, Access::direct);
    if (kPage % twin.alignment() != 0) return nullptr;
    return std::make_shared<const aio::File>(std::move(twin));
  } catch (const Error&) {
    return nullptr;
  }
}

}  // namespace

SharedFile::SharedFile(const std::filesystem::path& path, Mode mode, std::optional<Bytes> size)
    : path_(path.string()), mode_(mode) {
  if (mode == Mode::create) {
    buffered_ = std::make_shared<const aio::File>(aio::File::create(path, size.value_or(0)));
    direct_ = direct_twin(*buffered_, true);
  } else {
    auto file = std::make_shared<const aio::File>(aio::File::open_for_pages(path, writable()));
    (is_direct(*file) ? direct_ : buffered_) = std::move(file);
  }
  has_direct_ = direct_ != nullptr;
  size_ = any().size();
  if (mode == Mode::read_write && size && *size != size_) {
    any().resize(*size);
    reopen();
  }
}

void SharedFile::require_open() const {
  if (closed_) throw Error(ErrorCategory::usage, path_ + ": the file is closed");
}

void SharedFile::reopen() {
  const Access access = direct_ ? Access::direct : Access::buffered;
  auto file = std::make_shared<const aio::File>(any().reopened(writable(), access));
  size_ = file->size();
  buffered_ = access == Access::buffered ? file : nullptr;
  if (access == Access::direct) direct_ = std::move(file);
}

void SharedFile::reach(aio::Direction direction, Bytes offset, Bytes end) {
  if (end <= size_) return;
  // Other programs may have changed it.
  const Bytes now = size_now(any());
  if (end > now) {
    if (direction == aio::Direction::read) {
      throw Error(ErrorCategory::usage,
                  fmt::format("offset: {} bytes at {} end after {}, which has {} bytes",
                              end - offset, offset, path_, now));
    }
    any().resize(end);
  }
  reopen();
}

const Handle& SharedFile::opened(Way way) {
  if (way == Way::direct) return direct_;
  if (!buffered_) {
    buffered_ = std::make_shared<const aio::File>(direct_->reopened(writable(), Access::buffered));
    size_ = std::min(size_, buffered_->size());  // other programs may have truncated it
  }
  return buffered_;
}

Way SharedFile::way_for(Bytes offset, HostBytes memory) const {
  if (!direct_ || offset % kPage != 0 || memory.size() % kPage != 0) return Way::buffered;
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  return address % direct_->alignment() == 0 ? Way::direct : Way::buffered;
}

std::shared_ptr<PythonTransfer> SharedFile::start(aio::Direction direction, Bytes offset,
                                                  HostBytes memory, std::shared_ptr<void> owner) {
  Transfers& transfers = Transfers::get();
  const std::scoped_lock lock(mutex_);
  require_open();
  if (direction == aio::Direction::write && !writable()) {
    throw Error(
        ErrorCategory::usage,
        fmt::format("mode: {} is open for reading; open it with mode \"r+\" or \"w\"", path_));
  }
  constexpr Bytes kLargest = Bytes{1} << 62U;
  if (offset > kLargest || memory.size() > kLargest) {
    throw Error(ErrorCategory::usage, fmt::format("offset: {} is too large", offset));
  }
  auto transfer = std::make_shared<PythonTransfer>();
  transfer->direction = direction;
  transfer->offset = offset;
  transfer->memory = memory;
  if (memory.empty()) {
    transfer->done = true;
    return transfer;
  }
  reach(direction, offset, offset + memory.size());
  transfer->way = way_for(offset, memory);
  transfer->memory_owner = std::move(owner);
  transfer->file = {shared_from_this(), &transfers_};
  transfer->opened = opened(transfer->way);
  if (transfer->opened->size() < offset + memory.size()) {
    reach(direction, offset, offset + memory.size());
    transfer->opened = opened(transfer->way);
  }
  transfers.submit(transfer);
  return transfer;
}

void SharedFile::close() {
  const std::scoped_lock lock(mutex_);
  closed_ = true;
}

void SharedFile::release() {
  const std::scoped_lock lock(mutex_);
  direct_.reset();
  buffered_.reset();
}

void SharedFile::sync() {
  Handle file;
  {
    const std::scoped_lock lock(mutex_);
    require_open();
    file = direct_ ? direct_ : buffered_;
  }
  file->sync();
}

bool SharedFile::closed() {
  const std::scoped_lock lock(mutex_);
  return closed_;
}

Bytes SharedFile::size() {
  const std::scoped_lock lock(mutex_);
  return size_;
}

}  // namespace ballast::python
