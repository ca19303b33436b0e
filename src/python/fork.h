#pragma once

namespace ballast::python {

/// Remembers that this process has threads of Ballast from now on.
void note_threads();

/// True in a child of fork() whose parent had called note_threads(). Its threads do not exist here,
/// and locks may be held forever.
bool lost_threads() noexcept;

/// Throws Error(state) if lost_threads(). Call first in whatever uses threads or locks.
void refuse_after_fork();

}  // namespace ballast::python
