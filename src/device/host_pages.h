#pragma once

#include <filesystem>
#include <string_view>

#include "ballast/core/view.h"

namespace ballast::device {

/// Has the kernel make the pages of `memory` that do not exist yet, by several threads at once: it
/// zeroes them, which one thread does at a fraction of memory's speed. What is in `memory` stays. A
/// wish: where the kernel refuses, pages are made when they are first used. `memory`: page-aligned,
/// whole pages. Returns when all threads are done.
void make_resident(HostBytes memory);

/// The NUMA node that the PCI device at `address` ("0000:3b:00.0", digits of any case) is attached
/// to; -1 where the kernel does not tell. `devices`: the kernel's folder of PCI devices.
int numa_node_of(std::string_view address,
                 const std::filesystem::path& devices = "/sys/bus/pci/devices");

/// Asks the kernel to take pages of `memory` that do not exist yet from that node, or from others
/// when it is full. False where the kernel refuses. `memory`: page-aligned, whole pages.
bool prefer_numa_node(HostBytes memory, int node);

}  // namespace ballast::device
