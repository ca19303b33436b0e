#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>

#include <dlfcn.h>
#include <setjmp.h>
#include <ucontext.h>

// Only grid.cpp includes it.

namespace ballast::test::emulation {

#if defined(__x86_64__)
extern "C" void ballast_switch_stack(void** from, void* to);
// Saves the registers that calls keep on the current stack, and restores those of the other stack.
// With jumps of the C library, kernels whose threads exchange values took 40% longer.
asm(R"(
  .text
  .globl ballast_switch_stack
  .hidden ballast_switch_stack
  .type ballast_switch_stack, @function
ballast_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size ballast_switch_stack, . - ballast_switch_stack
)");

/// The point of a stack at which a thread stopped and will continue.
class Stop {
 public:
  /// Makes the stop before the first step of `start` on a stack that ends at `end`.
  void begin(void (*start)(), std::byte* /*stack*/, std::byte* end) {
    // Six registers, the address of `start`, and that of its caller, which is none. Functions start
    // with a stack whose end is 8 bytes off a multiple of 16.
    auto* const top = reinterpret_cast<void**>(end) - 8;
    std::fill(top, top + 8, nullptr);
    top[6] = reinterpret_cast<void*>(start);
    at_ = top;
  }
  /// Stops here and continues at `other`.
  void continue_at(Stop& other) { ballast_switch_stack(&at_, other.at_); }

 private:
  void* at_ = nullptr;
};
#else
/// Calls the _longjmp() of the C library. The address sanitizer replaces that function, and
/// prepares all calls of functions that do not return, because frames may be left for good. Fibers
/// leave no frame, and these preparations, with their system calls, took three quarters of the
/// time.
inline void long_jump(jmp_buf& to) {
  using Jump = void (*)(jmp_buf, int);
  static const auto jump = reinterpret_cast<Jump>(dlsym(RTLD_NEXT, "_longjmp"));
  jump(to, 1);
}

/// The point of a stack at which a thread stopped and will continue.
class Stop {
 public:
  void begin(void (*start)(), std::byte* stack, std::byte* end) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = static_cast<std::size_t>(end - stack);
    context_.uc_link = nullptr;
    makecontext(&context_, start, 0);
    is_new_ = true;
  }
  /// Contexts save the signal mask with a system call each time, jumps do not, so a context is used
  /// only for the first step onto the stack.
  [[gnu::noinline]] void continue_at(Stop& other) {
    if (_setjmp(jump_) != 0) return;
    if (!std::exchange(other.is_new_, false)) long_jump(other.jump_);
    setcontext(&other.context_);
  }

 private:
  ucontext_t context_ = {};
  jmp_buf jump_ = {};
  bool is_new_ = false;
};
#endif

}  // namespace ballast::test::emulation
