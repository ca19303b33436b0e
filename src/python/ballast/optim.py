"""Optimizers for PyTorch whose states live in host memory or on NVMe.

    optimizer = ballast.OffloadAdamW(model.parameters(), lr=1e-4, model=model, max_grad_norm=1.0)

They are `torch.optim.Optimizer`s: parameter groups, learning-rate schedulers and `state_dict` work
as with PyTorch's own. Parameters may be fp32, bf16 or fp16, on the CPU or on a GPU. Parameters of
16 bits have an fp32 master that the optimizer keeps.
"""

from __future__ import annotations

import os
import warnings
import weakref
from typing import Any, Callable, Iterable

import torch

from . import _ballast, _torch_states
from ._gradients import Gradients, parameters_to_hook
from ._overlap import ForwardOverlap

_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_STATES = ("fp32", "bf16_first", "8bit")
# Elements of a sub-group: the unit of transfer between memory and NVMe.
_SUB_GROUP = 8 << 20


class OffloadOptimizer(torch.optim.Optimizer):
    """Base of the optimizers; use one of its subclasses.

    Args:
        params: parameters or parameter groups, as for torch.optim; or a module, which is then also
            `model`.
        device: "cpu" or "nvme": where the optimizer states live.
        path: with "nvme": a directory, or several on different drives.
        host_bytes: with "nvme": memory for states and for the buffers between memory and NVMe. The
            states of the first parameters stay in memory as far as it goes. Default: buffers alone.
        max_grad_norm: clips the norm of all gradients together, as
            torch.nn.utils.clip_grad_norm_ does. 0 or None: no clipping. Do not clip elsewhere too.
        skip_non_finite: leaves out steps whose gradients have infinities or NaNs, and counts them.
        model: the module that owns the parameters; needed for the overlap.
        overlap: True: step() returns at once, and each module of `model` waits for its own
            parameters in its next forward pass. step() then sets all gradients to None. Code that
            reads weights between step() and the forward pass otherwise than by state_dict() calls
            synchronize() first. False: step() returns when everything is updated. Without `model`,
            and as soon as torch.compile has compiled a module of it, step() waits.
        gradient_hooks: False, True or "auto": whether gradients are taken out of `.grad` as soon as
            they are complete, and summed in fp32; see `parameters_to_hook`. With them, do not use
            torch.amp.GradScaler or other code that reads `.grad`.
        optimizer_states: "fp32", "bf16_first" or "8bit": the format of the moments.
        threads: threads of the update; 0: one for each usable CPU.
        any_file_system: with "nvme": accept a file system that does not suit swapping, such as
            tmpfs.

    Attributes:
        grad_norm: norm of all gradients of the last step, before clipping.
        skipped_steps: number of steps left out because of infinities or NaNs.
    """

    _name = ""  # of the update rule

    def __init__(self, params: Any, defaults: dict[str, Any], *, device: str = "cpu",
                 path: str | os.PathLike | Iterable[str | os.PathLike] | None = None,
                 host_bytes: int | None = None, max_grad_norm: float | None = None,
                 skip_non_finite: bool = True, model: torch.nn.Module | None = None,
                 overlap: bool | str = False, gradient_hooks: bool | str = False,
                 optimizer_states: str = "fp32", threads: int = 0, any_file_system: bool = False,
                 _sub_group: int = _SUB_GROUP) -> None:
        if isinstance(params, torch.nn.Module):
            model = model or params
            params = params.parameters()
        self._paths = _paths(device, path, host_bytes)
        _require(overlap in (False, True), "overlap", overlap, "False or True")
        _require(gradient_hooks in ("auto", True, False), "gradient_hooks", gradient_hooks,
                 'False, True or "auto"')
        _require(optimizer_states in _STATES, "optimizer_states", optimizer_states,
                 '"fp32", "bf16_first" or "8bit"')
        _require(max_grad_norm is None or max_grad_norm >= 0, "max_grad_norm", max_grad_norm,
                 "None or a number of at least 0")
        self._options: dict[str, Any] = {
            "sub_group": _sub_group, "paths": self._paths, "host_bytes": host_bytes,
            "any_file_system": any_file_system, "threads": threads}
        self._moments = optimizer_states
        self._hook_mode = gradient_hooks
        self.max_grad_norm = max_grad_norm
        self.skip_non_finite = skip_non_finite
        self.overlap = overlap
        self.grad_norm: float | None = None
        self.skipped_steps = 0
        self.updating = False
        self._states: _ballast.OptimizerStates  # since _make_states()
        self._index: dict[torch.Tensor, int] = {}
        self._steps: dict[torch.Tensor, int] = {}
        self._versions: dict[torch.Tensor, int] = {}
        self._mirrors: dict[torch.Tensor, torch.Tensor] = {}
        self._in_use: list[Any] = []
        self._gradients = Gradients()
        super().__init__(params, defaults)
        self._make_states()
        self._forward = ForwardOverlap(model, self) if model is not None else None
        _ballast_at_exit(self)

    # Steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. Returns the closure's loss. Raises ballast.Error if NVMe fails: the states are
        then lost, and the run goes on from a saved state."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.synchronize()
        gradients = self._gradients.collect(self._parameters())
        if not gradients:
            return loss
        if any(parameter not in self._index for parameter in gradients):
            self._rebuild()
        scale = self._scale_of(gradients)
        if scale is not None:
            self._begin(gradients, scale)
        if not self.overlap or self._forward is None or self._forward.compiled:
            self.synchronize()
        else:
            for parameter in gradients:
                parameter.grad = None
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; also forgets gradients that hooks have taken since the last step."""
        if not set_to_none:
            self.synchronize()
        self._gradients.clear()
        super().zero_grad(set_to_none)

    def synchronize(self) -> None:
        """Returns when all parameters are updated."""
        if not self.updating:
            return
        self._states.finish()
        self._upload(self._index)
        self.updating = False
        self._in_use = []

    def wait_for(self, parameters: Iterable[torch.Tensor]) -> None:
        """Returns when these parameters are updated."""
        known = [p for p in parameters if p in self._index]
        if not self.updating or not known:
            return
        self._states.wait(max(self._index[p] for p in known))
        self._upload(known)

    def refresh_from_model(self) -> None:
        """Takes the present weights of 16-bit parameters as their masters. Weights that
        load_state_dict() or other in-place operations of PyTorch have changed are noticed without
        it; changes through `.data` are not."""
        self.synchronize()
        for parameter in self._index:
            self._refresh(parameter)

    # States

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        params = param_group["params"]
        listed = [params] if isinstance(params, torch.Tensor) else list(params)
        for i, parameter in enumerate(p[1] if isinstance(p, tuple) else p for p in listed):
            _check_parameter(parameter, f"params[{len(self.param_groups)}][{i}]")
        super().add_param_group({**param_group, "params": listed})
        if hasattr(self, "_states"):
            self._rebuild()

    def state_dict(self) -> dict[str, Any]:
        """In the form of torch's optimizer of the same rule, which can load it: moments in fp32, in
        host memory. 16-bit parameters have one entry more, "master"."""
        self.synchronize()
        self.state.update(_torch_states.read(self))
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what state_dict() has returned, here or of torch's optimizer of the same rule. Load
        the model first. Nothing changes if it does not fit."""
        self.synchronize()
        states = _torch_states.check(self, state_dict)
        super().load_state_dict({**state_dict, "state": {}})
        _torch_states.write(self, states)

    def save(self, directory: str | os.PathLike) -> str:
        """Writes all states and settings to `directory`/optimizer.safetensors, piece by piece, and
        returns that path. A file of that name is replaced when the new one is complete."""
        self.synchronize()
        os.makedirs(directory, exist_ok=True)
        file = os.path.join(directory, "optimizer.safetensors")
        self._states.save(self._addresses(), file, _torch_states.notes(self))
        return file

    def load(self, directory: str | os.PathLike) -> None:
        """Loads what save() has written, also with another device, budget or format of the moments.
        fp32 parameters are the model's: load the model first. 16-bit parameters are set from their
        masters. Nothing changes if the file does not fit."""
        self.synchronize()
        file = os.path.join(directory, "optimizer.safetensors")
        settings = _torch_states.settings(self, _ballast.read_optimizer_notes(file))
        self._states.load(self._addresses(), file)
        _torch_states.apply(self, settings)
        for parameter, mirror in self._mirrors.items():
            parameter.data.copy_(mirror)
        self._remember_versions()

    @property
    def host_bytes(self) -> int:
        """Host memory that the states take, buffers for NVMe included."""
        return self._states.host_bytes

    @property
    def nvme_bytes(self) -> int:
        """Space on NVMe that the states take."""
        return self._states.nvme_bytes

    def __repr__(self) -> str:
        place = f"{self.host_bytes / 2**20:.0f} MiB in host memory"
        if self.nvme_bytes:
            place += f", {self.nvme_bytes / 2**20:.0f} MiB on NVMe"
        return f"{super().__repr__()}\nstates: {self._moments}, {place}"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{type(self).__name__} cannot be pickled or copied: "
                        "use state_dict() or save()")

    # Inside

    def _hyper(self, group: dict[str, Any], scale: float) -> _ballast.Hyper:
        raise NotImplementedError

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _make_states(self) -> None:
        known = [p for p in self._parameters() if p.requires_grad]
        self._index = {p: i for i, p in enumerate(known)}
        self._steps = {p: self._steps.get(p, 0) for p in known}
        self._mirrors = {}
        self._states = _ballast.OptimizerStates(
            self._name, self._moments, [(p.numel(), _TYPES[p.dtype]) for p in known],
            **self._options)
        self._remember_versions()
        self._gradients.hook(parameters_to_hook(known, self._hook_mode))

    def _rebuild(self) -> None:
        """New states for other parameters, with the values of the old ones."""
        old = _torch_states.read(self)
        del self._states
        self._make_states()
        _torch_states.write(self, {p: s for p, s in old.items() if p in self._index})

    def _weights(self, parameter: torch.Tensor) -> torch.Tensor:
        """The memory that the update changes: the parameter's own if it is on the CPU."""
        if parameter.device.type == "cpu" and parameter.is_contiguous():
            return parameter.detach()
        mirror = self._mirrors.get(parameter)
        if mirror is None:
            mirror = torch.empty(parameter.shape, dtype=parameter.dtype,
                                 pin_memory=parameter.device.type == "cuda")
            mirror.copy_(parameter.detach())
            self._mirrors[parameter] = mirror
        return mirror

    def _addresses(self) -> list[int]:
        return [self._weights(p).data_ptr() for p in self._index]

    def _refresh(self, parameter: torch.Tensor) -> None:
        mirror = self._mirrors.get(parameter)
        if mirror is not None:
            mirror.copy_(parameter.detach())
        self._states.forget_master(self._index[parameter])
        self._versions[parameter] = parameter._version

    def _remember_versions(self) -> None:
        self._versions = {p: p._version for p in self._index}

    def _scale_of(self, gradients: dict[torch.Tensor, torch.Tensor]) -> float | None:
        """The clip coefficient; None if the step is left out."""
        if not self.max_grad_norm and not self.skip_non_finite:
            return 1.0
        squares, non_finite = self._states.gradient_stats(
            [(g.data_ptr(), g.numel(), _TYPES[g.dtype]) for g in gradients.values()])
        self.grad_norm = squares**0.5
        if non_finite and self.skip_non_finite:
            self.skipped_steps += 1
            return None
        if not self.max_grad_norm:
            return 1.0
        return min(1.0, self.max_grad_norm / (self.grad_norm + 1e-6))

    def _begin(self, gradients: dict[torch.Tensor, torch.Tensor], scale: float) -> None:
        updates = []
        kept: list[Any] = []
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                gradient = gradients.get(parameter)
                if gradient is None:
                    continue
                if self._versions[parameter] != parameter._version:
                    self._refresh(parameter)
                self._steps[parameter] += 1
                weights = self._weights(parameter)
                kept += (weights, gradient)
                updates.append((self._index[parameter], weights.data_ptr(), gradient.data_ptr(),
                                _TYPES[gradient.dtype], self._steps[parameter], number))
        hypers = [self._hyper(group, scale) for group in self.param_groups]
        self._in_use = kept
        self._uploads = {p for p in gradients if p in self._mirrors}
        self._states.begin(updates, hypers)
        self.updating = True
        torch.autograd.graph.increment_version(list(gradients))
        for parameter in gradients:
            self._versions[parameter] = parameter._version

    def _upload(self, parameters: Iterable[torch.Tensor]) -> None:
        """Copies updated weights to parameters whose memory the update cannot change itself."""
        if not self._uploads:
            return
        for parameter in [p for p in parameters if p in self._uploads]:
            parameter.data.copy_(self._mirrors[parameter], non_blocking=True)
            self._uploads.discard(parameter)


class OffloadAdamW(OffloadOptimizer):
    """AdamW (decoupled weight decay), as torch.optim.AdamW. Further arguments: OffloadOptimizer."""

    _name = "adamw"

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 1e-2, **options: Any) -> None:
        _check_numbers(lr=lr, eps=eps, weight_decay=weight_decay)
        _check_betas(betas)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps,
                                  "weight_decay": weight_decay}, **options)

    def _hyper(self, group: dict[str, Any], scale: float) -> _ballast.Hyper:
        return _ballast.Hyper(optimizer="adamw", lr=float(group["lr"]),
                              beta1=float(group["betas"][0]), beta2=float(group["betas"][1]),
                              eps=group["eps"], weight_decay=group["weight_decay"],
                              gradient_scale=scale)


class OffloadLion(OffloadOptimizer):
    """Lion (Chen et al., 2023). Further arguments: OffloadOptimizer."""

    _name = "lion"

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99),
                 weight_decay: float = 0.0, **options: Any) -> None:
        _check_numbers(lr=lr, weight_decay=weight_decay)
        _check_betas(betas)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay},
                         **options)

    def _hyper(self, group: dict[str, Any], scale: float) -> _ballast.Hyper:
        return _ballast.Hyper(optimizer="lion", lr=float(group["lr"]),
                              beta1=float(group["betas"][0]), beta2=float(group["betas"][1]),
                              weight_decay=group["weight_decay"], gradient_scale=scale)


class OffloadAdagrad(OffloadOptimizer):
    """Adagrad, as torch.optim.Adagrad without lr_decay. Further arguments: OffloadOptimizer."""

    _name = "adagrad"

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0,
                 eps: float = 1e-10, **options: Any) -> None:
        _check_numbers(lr=lr, eps=eps, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, **options)

    def _hyper(self, group: dict[str, Any], scale: float) -> _ballast.Hyper:
        return _ballast.Hyper(optimizer="adagrad", lr=float(group["lr"]), eps=group["eps"],
                              weight_decay=group["weight_decay"], gradient_scale=scale)


class OffloadSGD(OffloadOptimizer):
    """SGD with (Nesterov's) momentum, as torch.optim.SGD. Further arguments: OffloadOptimizer."""

    _name = "sgd"

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.0,
                 weight_decay: float = 0.0, nesterov: bool = False, **options: Any) -> None:
        _check_numbers(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and momentum == 0:
            raise ValueError("nesterov: needs a momentum")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay,
                                  "nesterov": nesterov}, **options)

    def _hyper(self, group: dict[str, Any], scale: float) -> _ballast.Hyper:
        return _ballast.Hyper(optimizer="sgd", lr=float(group["lr"]), momentum=group["momentum"],
                              nesterov=group["nesterov"], weight_decay=group["weight_decay"],
                              gradient_scale=scale)


def _ballast_at_exit(optimizer: OffloadOptimizer) -> None:
    """Ends a running step before the interpreter goes, with the arrays that it uses still there."""
    import atexit

    reference = weakref.ref(optimizer)

    def finish() -> None:
        alive = reference()
        if alive is not None and alive.updating:
            try:
                alive._states.finish()
            except RuntimeError as error:
                warnings.warn(f"the last optimizer step failed: {error}")

    atexit.register(finish)
    weakref.finalize(optimizer, atexit.unregister, finish)


def _require(condition: bool, name: str, value: Any, choices: str) -> None:
    if not condition:
        raise ValueError(f"{name}: {value!r} is not {choices}")


def _paths(device: str, path: Any, host_bytes: int | None) -> list[str]:
    _require(device in ("cpu", "nvme"), "device", device, '"cpu" or "nvme"')
    if device == "cpu":
        for name, value in (("path", path), ("host_bytes", host_bytes)):
            if value is not None:
                raise ValueError(f'{name}: only with device="nvme"')
        return []
    if path is None:
        raise ValueError('path: device="nvme" needs a directory')
    if isinstance(path, (str, os.PathLike)):
        path = [path]
    return [os.path.abspath(os.fspath(one)) for one in path]


def _check_parameter(parameter: Any, name: str) -> None:
    if not isinstance(parameter, torch.Tensor):
        raise TypeError(f"{name}: {type(parameter).__name__} is not a tensor")
    if type(parameter).__name__ == "DTensor" or hasattr(parameter, "device_mesh"):
        raise TypeError(f"{name}: DTensors (FSDP2, tensor parallelism) are not supported; use "
                        "DistributedDataParallel, or ballast train")
    if parameter.dtype not in _TYPES:
        raise TypeError(f"{name}: {parameter.dtype} is not float32, bfloat16 or float16")
    if parameter.layout != torch.strided:
        raise TypeError(f"{name}: sparse parameters are not supported")
    if parameter.device.type not in ("cpu", "cuda"):
        raise TypeError(f"{name}: is on {parameter.device}, not on the CPU or a CUDA device")


def _check_numbers(**numbers: float) -> None:
    for name, value in numbers.items():
        if not float(value) >= 0:
            raise ValueError(f"{name}: {value!r} is not a number of at least 0")


def _check_betas(betas: tuple[float, float]) -> None:
    if len(betas) != 2 or not all(0 <= float(beta) < 1 for beta in betas):
        raise ValueError(f"betas: {betas!r} are not two numbers from 0 to below 1")
