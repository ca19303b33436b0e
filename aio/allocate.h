#pragma once

#include "ballast/core/units.h"

namespace ballast::aio {

/// Makes the file `descriptor`, which has `begin` bytes, exactly `size` bytes long with all its
/// blocks allocated: with fallocate, or by writing zeros where the file system lacks it.
/// `alignment` is File::alignment(), of which `begin` is a multiple. Returns 0 or the errno.
int allocate_blocks(int descriptor, Bytes size, Bytes alignment, Bytes begin = 0);

/// allocate_blocks without fallocate: writes zeros.
int write_zeros(int descriptor, Bytes size, Bytes alignment, Bytes begin = 0);

}  // namespace ballast::aio
