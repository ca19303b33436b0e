#pragma once

namespace ballast::python {

/// Records that this process has threads of Ballast from now on.
void note_threads();

/// True in a child of fork() whose parent had called note_threads(). Its threads do not exist here,
/// and locks may be held forever.
bool lost_threads() noexcept;

/// Throws Error(state) if lost_threads(). Call it before using threads or locks.
void refuse_after_fork();

}  // namespace ballast::python
