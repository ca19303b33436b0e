#include <algorithm>
#include <memory>
#include <string_view>

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ballast/aio/file.h"
#include "ballast/core/error.h"
#include "ballast/core/log.h"

#include "aio/nameless.h"

namespace ballast::aio {
namespace {

bool is_number(std::string_view text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

/// Whether `name` has the form .ballast-swap-PID-N.
bool is_swap_name(std::string_view name) {
  if (name.substr(0, kSwapPrefix.size()) != kSwapPrefix) return false;
  const std::string_view rest = name.substr(kSwapPrefix.size());
  const std::size_t dash = rest.find('-');
  return dash != std::string_view::npos && is_number(rest.substr(0, dash)) &&
         is_number(rest.substr(dash + 1));
}

/// Removes `name` and adds it to `found` if it belongs to a crashed run of this user, whose lock is
/// free. The lock is held from the check to the unlink to exclude concurrent sweeps.
void sweep_one(int directory, const char* name, Leftovers& found) {
  const Descriptor file(
      openat(directory, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
  if (!file.is_open()) return;
  struct stat status {};
  if (fstat(file.number(), &status) != 0) return;
  if (!S_ISREG(status.st_mode) || status.st_uid != geteuid()) return;
  if (!try_lock(file) || !is_same_file(directory, name, status)) return;
  if (unlinkat(directory, name, 0) != 0) return;
  constexpr Bytes kStatBlock = 512;
  ++found.files;
  found.bytes += static_cast<Bytes>(status.st_blocks) * kStatBlock;
}

}  // namespace

Leftovers remove_leftovers(const std::filesystem::path& directory) {
  Leftovers found;
  const auto close_directory = [](DIR* entries) { closedir(entries); };
  const std::unique_ptr<DIR, decltype(close_directory)> entries(opendir(directory.c_str()),
                                                                close_directory);
  if (!entries) return found;
  while (const dirent* entry = readdir(entries.get())) {
    if (is_swap_name(entry->d_name)) sweep_one(dirfd(entries.get()), entry->d_name, found);
  }
  if (found.files > 0) {
    log(LogLevel::info,
        fmt::format("aio: removed {} swap file{} ({}) of crashed runs from {}", found.files,
                    found.files == 1 ? "" : "s", format_bytes(found.bytes), directory.string()));
  }
  return found;
}

}  // namespace ballast::aio
