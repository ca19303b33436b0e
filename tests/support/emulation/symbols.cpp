#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <cxxabi.h>
#include <elf.h>
#include <link.h>

#include "tests/support/emulation/settings.h"

// Names of functions from the program's symbol table, which also has those of anonymous namespaces.
// (The dynamic symbols that dladdr() reads have none of them.)

namespace ballast::test::emulation {
namespace {

template <class T>
std::vector<T> read_table(std::ifstream& file, std::size_t offset, std::size_t bytes) {
  std::vector<T> table(bytes / sizeof(T));
  file.seekg(static_cast<std::streamoff>(offset));
  file.read(reinterpret_cast<char*>(table.data()),
            static_cast<std::streamsize>(table.size() * sizeof(T)));
  return table;
}

/// Names by the last address of a function, relative to the program's start.
std::map<std::uintptr_t, std::pair<std::uintptr_t, std::string>> read_functions() {
  std::map<std::uintptr_t, std::pair<std::uintptr_t, std::string>> functions;
  std::ifstream file("/proc/self/exe", std::ios::binary);
  const auto headers = read_table<ElfW(Ehdr)>(file, 0, sizeof(ElfW(Ehdr)));
  if (!file) return {};
  const ElfW(Ehdr)& header = headers.front();
  const auto sections = read_table<ElfW(Shdr)>(file, header.e_shoff,
                                               std::size_t{header.e_shnum} * sizeof(ElfW(Shdr)));
  for (const ElfW(Shdr) & section : sections) {
    if (section.sh_type != SHT_SYMTAB) continue;
    const ElfW(Shdr)& strings = sections[section.sh_link];
    auto names = read_table<char>(file, strings.sh_offset, strings.sh_size);
    names.push_back('\0');
    for (const auto& symbol : read_table<ElfW(Sym)>(file, section.sh_offset, section.sh_size)) {
      if ((symbol.st_info & 0xfU) != STT_FUNC || symbol.st_size == 0) continue;
      functions[symbol.st_value + symbol.st_size - 1] = {
          symbol.st_value,
          std::string(names.data() + std::min<std::size_t>(symbol.st_name, names.size() - 1))};
    }
  }
  return functions;
}

/// Address of the first byte of the program in memory.
std::uintptr_t program_start() {
  std::uintptr_t start = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* found) {
        *static_cast<std::uintptr_t*>(found) = info->dlpi_addr;
        return 1;  // the program comes first
      },
      &start);
  return start;
}

std::string demangled(const std::string& name) {
  int status = 0;
  char* const text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string result = status == 0 ? text : name;
  std::free(text);
  return result;
}

}  // namespace

std::string function_name(const void* address) {
  static const auto functions = read_functions();
  const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(address) - program_start();
  const auto found = functions.lower_bound(at);
  if (found == functions.end() || found->second.first > at) return "an unknown function";
  return demangled(found->second.second);
}

}  // namespace ballast::test::emulation
