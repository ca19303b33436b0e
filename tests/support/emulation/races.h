#pragma once

namespace ballast::test::emulation {

/// Watches all later grids of this process for races. Kernels must be compiled with
/// -fsanitize=thread, whose calls for each access races.cpp defines. A race ends the process with a
/// message that names the kernel, the threads and the memory:
/// - two threads of a block access a byte, at least one writes, and neither a barrier of the block
///   nor, in one warp, __syncwarp() is between. Shuffles, votes and products order no memory.
/// - two blocks of a grid access a byte of global memory, and at least one writes.
/// - anyone accesses the destination of an asynchronous copy that is not awaited.
/// - a product of a warpgroup reads what was written after its start, or was not shown to products.
/// - a block has more shared memory, dynamic plus used static memory, than the GPU allows.
/// Atomic functions do not race with each other.
///
/// Source of the method, the last write and compressed reads of a place with the times of their
/// threads: Flanagan and Freund, "FastTrack: efficient and precise dynamic race detection", 2009.
void watch_races();

}  // namespace ballast::test::emulation
