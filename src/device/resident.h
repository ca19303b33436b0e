#pragma once

#include "ballast/core/view.h"

namespace ballast::device {

/// Has the kernel make the pages of `memory` that do not exist yet, by several threads at once: it
/// zeroes them, which one thread does at a fraction of memory's speed. What is in `memory` stays. A
/// wish: where the kernel refuses, pages are made when they are first used. `memory`: page-aligned,
/// whole pages. Returns when all threads are done.
void make_resident(HostBytes memory);

}  // namespace ballast::device
