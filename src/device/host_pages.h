#pragma once

#include <filesystem>
#include <string_view>

#include "ballast/core/view.h"

namespace ballast::device {

/// Populates the missing pages of `memory` (page-aligned, whole pages) with several threads,
/// because one thread zeroes pages at a fraction of memory's speed. Keeps the contents. If the
/// kernel refuses, pages are created at their first use.
void make_resident(HostBytes memory);

/// Returns the NUMA node of the PCI device at `address` ("0000:3b:00.0", any case); -1 if unknown.
/// `devices`: the kernel's folder of PCI devices.
int numa_node_of(std::string_view address,
                 const std::filesystem::path& devices = "/sys/bus/pci/devices");

/// Asks the kernel to place the missing pages of `memory` (page-aligned, whole pages) on `node`, or
/// on others when it is full. Returns false if the kernel refuses.
bool prefer_numa_node(HostBytes memory, int node);

}  // namespace ballast::device
