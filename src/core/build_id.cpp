#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include <elf.h>
#include <fmt/format.h>
#include <link.h>

#include "ballast/core/build_info.h"

namespace ballast {
namespace {

/// Returns the build id among the notes of a segment, or "".
std::string id_among(std::span<const std::byte> notes) {
  const auto aligned = [](std::size_t size) { return (size + 3) / 4 * 4; };
  while (notes.size() >= sizeof(ElfW(Nhdr))) {
    ElfW(Nhdr) head;
    std::memcpy(&head, notes.data(), sizeof head);
    notes = notes.subspan(sizeof head);
    const std::size_t name = aligned(head.n_namesz);
    const std::size_t whole = name + aligned(head.n_descsz);
    if (whole > notes.size()) break;
    const bool gnu = head.n_namesz == sizeof ELF_NOTE_GNU &&
                     std::memcmp(notes.data(), ELF_NOTE_GNU, sizeof ELF_NOTE_GNU) == 0;
    if (gnu && head.n_type == NT_GNU_BUILD_ID) {
      std::string id;
      for (const std::byte byte : notes.subspan(name, head.n_descsz)) {
        id += fmt::format("{:02x}", std::to_integer<unsigned>(byte));
      }
      return id;
    }
    notes = notes.subspan(whole);
  }
  return "";
}

/// Finds the loaded file that has this function, and its build id.
int visit(dl_phdr_info* info, std::size_t /*size*/, void* id) {
  const std::span segments(info->dlpi_phdr, info->dlpi_phnum);
  const auto here = reinterpret_cast<std::uintptr_t>(&visit);
  const bool own = std::any_of(segments.begin(), segments.end(), [&](const ElfW(Phdr) & one) {
    const std::uintptr_t begin = info->dlpi_addr + one.p_vaddr;
    return one.p_type == PT_LOAD && here >= begin && here - begin < one.p_memsz;
  });
  if (!own) return 0;
  for (const ElfW(Phdr) & one : segments) {
    if (one.p_type != PT_NOTE) continue;
    const auto* const begin = reinterpret_cast<const std::byte*>(info->dlpi_addr + one.p_vaddr);
    std::string found = id_among({begin, one.p_memsz});
    if (!found.empty()) *static_cast<std::string*>(id) = std::move(found);
  }
  return 1;
}

}  // namespace

std::string build_id() {
  std::string id;
  dl_iterate_phdr(visit, &id);
  return id;
}

}  // namespace ballast
