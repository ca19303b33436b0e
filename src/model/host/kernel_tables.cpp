#include "src/model/host/kernel_tables.h"

#include "ballast/core/machine.h"

// BALLAST_KERNEL_ISAS(X) applies X to the name of each instruction set that is compiled in, slowest
// first (src/model/meson.build).
namespace ballast::model::host {

#define BALLAST_DECLARE(name) \
  namespace name {            \
  void fill(KernelTable&);    \
  }
BALLAST_KERNEL_ISAS(BALLAST_DECLARE)
#undef BALLAST_DECLARE

std::vector<const KernelTable*> kernel_tables() {
  static const std::vector<KernelTable> tables = [] {
    std::vector<KernelTable> supported;
    const auto add = [&](Isa isa, void (*fill)(KernelTable&)) {
      if (!cpu_supports(isa)) return;
      KernelTable table;
      table.isa = isa;
      fill(table);
      supported.push_back(table);
    };
#define BALLAST_ADD(name) add(Isa::name, name::fill);
    BALLAST_KERNEL_ISAS(BALLAST_ADD)
#undef BALLAST_ADD
    return supported;
  }();
  std::vector<const KernelTable*> available;
  for (const KernelTable& table : tables) {
    if (may_run(table.isa)) available.push_back(&table);
  }
  return available;
}

}  // namespace ballast::model::host
