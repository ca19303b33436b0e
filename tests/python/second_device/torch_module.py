"""torch.second: what PyTorch and programs ask a device's module for, as torch.cuda has it."""

import atexit
import contextlib
import types

import torch

NAME = "second"


class Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, **keywords):
        return super().__new__(cls, device or f"{NAME}:0", priority=priority, **keywords)


def event(enable_timing=False, **_):
    """Makes an event. PyTorch takes no class derived from torch.Event for the other end of a time."""
    return torch.Event(f"{NAME}:0", enable_timing=enable_timing)


@contextlib.contextmanager
def stream(new):
    """Makes a stream current."""
    before = torch.accelerator.current_stream()
    if new is not None:
        torch.accelerator.set_stream(new)
    try:
        yield new
    finally:
        torch.accelerator.set_stream(before)


class device(contextlib.nullcontext):
    """Makes a device current: there is one."""

    def __init__(self, index):
        super().__init__()
        self.idx = index


def _statistics():
    accelerator = torch.accelerator.memory
    return {name: getattr(accelerator, name)
            for name in ("empty_cache", "memory_stats", "memory_allocated", "max_memory_allocated",
                         "memory_reserved", "max_memory_reserved", "reset_peak_memory_stats",
                         "reset_accumulated_memory_stats")}


def register(native):
    """Registers the device's name and module. Returns the module."""
    torch.utils.rename_privateuse1_backend(NAME)
    native.register_operators()
    module = types.ModuleType(f"torch.{NAME}", __doc__)
    cpu = (torch.get_rng_state, torch.set_rng_state)
    vars(module).update(
        Stream=Stream, Event=event, stream=stream, device=device, _initialized=True,
        is_available=lambda: True, is_initialized=lambda: True, init=lambda: None, _lazy_init=lambda: None,
        device_count=lambda: 1, current_device=lambda: 0, set_device=lambda index: None,
        _is_in_bad_fork=lambda: False,
        current_stream=lambda device=None: torch.accelerator.current_stream(f"{NAME}:0"),
        set_stream=torch.accelerator.set_stream,
        synchronize=lambda device=None: native.synchronize(),
        # Random numbers come from the CPU's generator, whose seed torch.manual_seed() sets.
        manual_seed=torch.default_generator.manual_seed, manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=None: cpu[0](),
        set_rng_state=lambda state, device=None: cpu[1](state),
        get_rng_state_all=lambda: [cpu[0]()], set_rng_state_all=lambda states: cpu[1](states[0]),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        is_bf16_supported=lambda: True,
        mem_get_info=lambda device=None: torch.accelerator.get_memory_info(f"{NAME}:0"),
        set_delays=native.set_delays, set_budget=native.set_budget, budget=native.budget,
        register_pinned=native.register_pinned, unregister_pinned=native.unregister_pinned,
        **_statistics())
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    native.allow_data_of_other_device()
    default = torch.accelerator.current_stream(f"{NAME}:0")
    module.default_stream = lambda device=None: default
    atexit.register(_end, native)
    return module


def _end(native):
    with contextlib.suppress(RuntimeError):
        native.synchronize()
