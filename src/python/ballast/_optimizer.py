"""The base of the optimizers."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Callable, Iterable

import torch
from torch.utils.weak import WeakIdKeyDictionary

from . import _arguments, _ballast, _guards, _ranks, _state_files, _torch_states
from ._engine import Engine, check_member
from ._gradients import Collected
from ._options import spell_out
from ._state_mapping import StateMapping

_STATES = ("fp32", "bf16_first", "8bit")
_OVERLAP: dict[Any, Any] = {False: False, True: True, "check": "check",
                            "none": False, "next_forward": True}  # names of earlier versions
# Number of elements in a sub-group, the unit of transfer between memory and NVMe.
_SUB_GROUP = 8 << 20


class OffloadOptimizer(torch.optim.Optimizer):
    """Base of the optimizers; use one of its subclasses.

    Args:
        params: parameters, named parameters or parameter groups, as for torch.optim; or a module.
        device: "cpu" or "nvme": where the optimizer states live.
        path: with "nvme": a directory, or several on different drives.
        host_bytes: with "nvme": bytes of memory for states and for the buffers between memory and
            NVMe. The states of the first parameters stay in memory as far as it goes. Default:
            buffers alone.
        max_grad_norm: clips the norm of all gradients together, as
            torch.nn.utils.clip_grad_norm_ does. 0 or None: no clipping. Do not clip elsewhere too.
        skip_non_finite: skips steps whose gradients have infinities or NaNs, and counts them.
        model: the module that owns the parameters; gives them names in messages and in save().
        overlap: False: step() returns when everything is updated. True: step() returns at once and
            sets all gradients to None; every use of a parameter waits until it is updated. Code that
            reads its memory without PyTorch's Python interface calls synchronize() first; src/python/optimizers.md
            lists it. "check": finds such code, slowly. Weights have NaNs until something
            waits for them, and a write in between raises RuntimeError.
        gradient_hooks: False, True or "auto": whether gradients are taken out of `.grad` as soon as
            they are complete, and summed in fp32; see `parameters_to_hook`. Then `.grad` has no
            values: clip_grad_norm_() and torch.amp.GradScaler raise RuntimeError.
        optimizer_states: "fp32", "bf16_first" or "8bit": the format of the moments.
        minimal_size: parameters of fewer elements have fp32 states in memory, whatever `device` and
            `optimizer_states` are.
        threads: threads of the update; 0: one per usable CPU.
        any_file_system: with "nvme": accept a file system that does not suit swapping, such as
            tmpfs.
        process_group: ranks that have different parameters, such as pipeline stages or the shards of
            other libraries: `max_grad_norm` and `skip_non_finite` are for all of them together.
            FSDP, ZeroRedundancyOptimizer and DTensors are found without it.
        amsgrad, maximize, differentiable: as for torch.optim, but only False is supported.
        foreach, fused, capturable: as for torch.optim. They have no effect: the update is always
            fused, and on the CPU.

    Attributes:
        grad_norm: norm of all gradients of the last step, before clipping. If ranks have shards of the
            parameters, that of all shards.
        skipped_steps: number of steps skipped because of infinities or NaNs.
        updating: whether a step is still running.
    """

    _name = ""  # name of the update rule

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        spell_out(cls, OffloadOptimizer)

    def __init__(self, params: Any, defaults: dict[str, Any], *, device: str = "cpu",
                 path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
                 host_bytes: int | None = None, max_grad_norm: float | None = None,
                 skip_non_finite: bool = True, model: torch.nn.Module | None = None,
                 overlap: bool | str = False, gradient_hooks: bool | str = False,
                 optimizer_states: str = "fp32", minimal_size: int = 0, threads: int = 0,
                 any_file_system: bool = False,
                 process_group: torch.distributed.ProcessGroup | None = None,
                 amsgrad: bool = False, maximize: bool = False, foreach: bool | None = None,
                 fused: bool | None = None, capturable: bool = False, differentiable: bool = False,
                 _sub_group: int = _SUB_GROUP) -> None:
        _check_settings(defaults)
        if "betas" in defaults:
            defaults["betas"] = tuple(defaults["betas"])
        if model is not None and not isinstance(model, torch.nn.Module):
            raise TypeError(f"model: must be a torch.nn.Module, not {type(model).__name__}")
        if isinstance(params, torch.nn.Module):
            model = params if model is None else model
            params = list(params.parameters())
        if isinstance(params, Mapping):
            raise TypeError("params: must be parameters, named parameters or groups, not a dict; pass "
                            "named_parameters(), or a list of groups")
        _arguments.choice(overlap, "overlap", _OVERLAP)
        _arguments.choice(gradient_hooks, "gradient_hooks", (False, True, "auto"))
        _arguments.choice(optimizer_states, "optimizer_states", _STATES)
        if max_grad_norm is not None:
            _arguments.number(max_grad_norm, "max_grad_norm")
        self.max_grad_norm = max_grad_norm
        self.skip_non_finite = skip_non_finite
        self.overlap = _OVERLAP[overlap]
        self.grad_norm: float | None = None
        self.skipped_steps = 0
        options = {**_place(device, path, host_bytes), "any_file_system": bool(any_file_system),
                   "threads": _arguments.whole(threads, "threads", most=1 << 16),
                   "sub_group": _sub_group}
        self._model_names: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()
        if model is not None:
            self._model_names.update({p: n for n, p in model.named_parameters()})
        self._engine = Engine(self._name, optimizer_states, options,
                              _arguments.whole(minimal_size, "minimal_size"), gradient_hooks)
        self._ranks = _ranks.Ranks(_ranks.check_group(process_group) or _ranks.group_of_zero(), model)
        own = weakref.ref(self)
        self._mapping = StateMapping(
            self._engine, lambda: [] if (found := own()) is None else found.param_groups)
        self._made = False
        weakref.finalize(self, self._engine.end)
        settings = {"amsgrad": amsgrad, "maximize": maximize, "foreach": foreach, "fused": fused,
                    "capturable": capturable, "differentiable": differentiable}
        known = _torch_states.torch_defaults(self._name)
        super().__init__(params, {
            **known, **{n: v for n, v in settings.items() if n in known or v}, **defaults})
        self._engine.add(self._labels(range(len(self.param_groups))))
        self._learn_ranks()
        self._made = True

    # Steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs one update. Returns the closure's loss. Raises ValueError, TypeError naming a
        parameter that has changed so that it cannot be updated, before anything is updated;
        ballast.Error if NVMe fails: the states are then lost, and the run must restart from a saved
        state; RuntimeError if another rank that has a part of the parameters has failed."""
        with self._ranks.failing_together(bool(self.max_grad_norm or self.skip_non_finite)):
            return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.synchronize()
        engine = self._engine
        self._learn_ranks()
        records = engine.records_in(self.param_groups)
        if _guards.any_guarded():
            for record in records:
                # A parameter of another optimizer, or of an offloaded module. What is on NVMe stays there.
                on_nvme = _guards.nvme_place_of(record.key) is not None
                (_guards.wait_for_update if on_nvme else _guards.wait_for)(record.key)
        if not records and not self._ranks.groups:
            return loss
        for number, group in enumerate(self.param_groups):
            self._check_group(group, f"param_groups[{number}]")
        self._mapping.settle()
        self._mapping.drop_unused()
        engine.follow(records)
        gradients = engine.gradients.collect(records)
        engine.require(records)
        engine.hook(record.key for record in records)
        scale = self._scale_of(gradients)
        if scale is not None and gradients:
            engine.begin(self.param_groups, gradients,
                         [self._hyper(group, scale) for group in self.param_groups],
                         bool(self.overlap))
        if not self.overlap:
            engine.synchronize()
            return loss
        for parameter in gradients:
            parameter.grad = None
        if scale is None or self._ranks.read_unguarded or _guards.code_is_compiled():
            engine.synchronize()
        else:
            engine.guard(gradients, hide=self.overlap == "check")
        return loss

    @property
    def updating(self) -> bool:
        return self._engine.updating

    def synchronize(self) -> None:
        """Returns when all parameters are updated."""
        self._engine.synchronize()

    def wait_for(self, parameters: Iterable[torch.Tensor]) -> None:
        """Returns when these parameters are updated."""
        for parameter in parameters:
            _guards.wait_for(parameter)

    def refresh_from_model(self) -> None:
        """Uses the present weights of 16-bit parameters as their masters, which drops the lower bits
        of all masters. Changed weights on the CPU become masters without this call. On a GPU,
        changes that PyTorch does not count need it: see optimizers.md."""
        self.synchronize()
        for record in self._engine.records.values():
            self._engine.refresh(record)

    # States

    @property  # type: ignore[override]
    def state(self) -> StateMapping:
        """States by parameter, read on access; see StateMapping."""
        return self._mapping

    @state.setter
    def state(self, states: Mapping[Any, Any]) -> None:
        self._mapping.replace(states)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like torch's. States of the existing parameters do not move, and nothing changes if the
        new ones cannot be made."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group: must be a dict, not {type(param_group).__name__}")
        if "params" not in param_group:
            raise ValueError("param_group: has no 'params'")
        params = param_group["params"]
        if not isinstance(params, (torch.Tensor, set)):
            params = list(params)
        number = len(self.param_groups)
        _check_parameters([params] if isinstance(params, torch.Tensor) else params, number)
        super().add_param_group({**param_group, "params": params})
        try:
            self._check_group(self.param_groups[-1], f"params[{number}]")
            if self._made:
                self._engine.add(self._labels([number]))
                self._learn_ranks()
        except BaseException:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """States in the form of torch's optimizer of the same rule, which can load it: moments in
        fp32, in host memory. 16-bit parameters have one more entry, "master"."""
        self.synchronize()
        with self._mapping.as_copies():
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a result of state_dict(), of this class or of torch's optimizer of the same rule.
        Weights do not change: the model may be loaded before or after. A loaded master is used
        where the weights at the next step are its rounded values; elsewhere the weights become
        the master. Nothing changes if it does not fit."""
        self.synchronize()
        if isinstance(state_dict, Mapping):
            state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            result = hook(self, state_dict)
            state_dict = state_dict if result is None else result
        groups, states = _torch_states.parse(self._engine, self.param_groups, state_dict)
        _torch_states.write(self._engine, states)
        self.param_groups = groups
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def save(self, directory: str | os.PathLike[str]) -> str:
        """Writes all states and settings to `directory`/optimizer.safetensors, piece by piece, with
        the names of the parameters if they are known, and returns that path. A file of that name is
        replaced when the new one is complete. Ranks with shards write a file each, such as
        optimizer-rank-0-of-2.safetensors. Raises OSError."""
        os.makedirs(_arguments.path(directory, "directory"), exist_ok=True)
        file = os.path.join(directory, self._ranks.file_name("optimizer.safetensors"))
        _state_files.save(self._engine, self.param_groups, self._names(), file, self.skipped_steps)
        return file

    def load(self, directory: str | os.PathLike[str]) -> None:
        """Loads a file of save(), also with another device, budget or format of the moments and
        with other frozen parameters. States are matched by the names of the parameters if both
        sides have names, otherwise by their places in the groups. fp32 parameters are the model's.
        16-bit parameters are set from their masters. Nothing changes if the
        file does not fit or is damaged. Shards need the number of ranks that was saved.
        Raises OSError, ValueError, ballast.Error."""
        file = os.path.join(_arguments.path(directory, "directory"),
                            self._ranks.file_name("optimizer.safetensors"))
        settings = _state_files.load(self._engine, self.param_groups, self._names(), file)
        for group, values in zip(self.param_groups, settings["param_groups"]):
            for name, value in values.items():
                group[name] = tuple(value) if isinstance(group.get(name), tuple) else value
        self.skipped_steps = settings["skipped_steps"]

    @property
    def host_bytes(self) -> int:
        """Host memory that the states take, including buffers for NVMe."""
        return self._engine.bytes_of("host_bytes")

    @property
    def nvme_bytes(self) -> int:
        """Space on NVMe that the states take."""
        return self._engine.bytes_of("nvme_bytes")

    def __repr__(self) -> str:
        place = f"{self.host_bytes / 2**20:.0f} MiB in host memory"
        if self.nvme_bytes:
            place += f", {self.nvme_bytes / 2**20:.0f} MiB on NVMe"
        return f"{super().__repr__()}\nstates: {self._engine.moments}, {place}"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{type(self).__name__} cannot be pickled or copied: "
                        "use state_dict() or save()")

    # Inside

    def _hyper(self, group: dict[str, Any], scale: float) -> _ballast.Hyper:
        values: dict[str, Any] = {n: group[n] for n in self._engine.row["parameters"]}
        if "betas" in values:
            values["beta1"], values["beta2"] = values.pop("betas")
        for name, value in values.items():
            values[name] = bool(value) if name == "nesterov" else float(value)
        return _ballast.Hyper(optimizer=self._name, gradient_scale=scale, **values)

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _check_group(self, group: dict[str, Any], place: str) -> None:
        _torch_states.check_group(group, place, self._name)

    def _names(self) -> dict[torch.Tensor, str]:
        """The names that are known: those of the groups, otherwise those of the model."""
        names = dict(self._model_names)
        for group in self.param_groups:
            names.update(zip(group["params"], group.get("param_names", ())))
        return names

    def _labels(self, groups: Iterable[int]) -> list[tuple[torch.Tensor, str]]:
        """The parameters of these groups, and their names in messages."""
        known = self._names()
        labels = []
        for number in groups:
            for i, parameter in enumerate(self.param_groups[number]["params"]):
                name = f" ({known[parameter]})" if parameter in known else ""
                labels.append((parameter, f"params[{number}][{i}]{name}"))
        return labels

    def _learn_ranks(self) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._ranks.learn([self._engine.record(p) for p in self._parameters() if p.requires_grad])

    def _scale_of(self, gradients: Collected) -> float | None:
        """The clip coefficient; None if the step is skipped."""
        if not self.max_grad_norm and not self.skip_non_finite:
            return 1.0
        squares, non_finite = self._ranks.gradient_stats(self._engine, gradients)
        self.grad_norm = squares**0.5
        if non_finite and self.skip_non_finite:
            self.skipped_steps += 1
            return None
        if not self.max_grad_norm:
            return 1.0
        return min(1.0, self.max_grad_norm / (self.grad_norm + 1e-6))


def _place(device: Any, path: Any, host_bytes: Any) -> dict[str, Any]:
    """Place of the states, for native code."""
    _arguments.choice(device, "device", ("cpu", "nvme"))
    if device == "cpu":
        for name, value in (("path", path), ("host_bytes", host_bytes)):
            if value is not None:
                raise ValueError(f'{name}: only with device="nvme"')
        return {"paths": [], "host_bytes": None}
    if path is None:
        raise ValueError('path: device="nvme" needs a directory')
    if host_bytes is not None:
        host_bytes = _arguments.whole(host_bytes, "host_bytes")
    return {"paths": _arguments.paths(path, "path"), "host_bytes": host_bytes}


def _check_parameters(params: Iterable[Any], number: int) -> None:
    """Raises TypeError, ValueError for parameters of a group that cannot be updated, or that appear
    twice."""
    places: dict[int, str] = {}
    for i, entry in enumerate(params):
        parameter = entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry
        place = f"params[{number}][{i}]"
        check_member(parameter, place)
        first = places.setdefault(id(parameter), place)
        if first != place:
            raise ValueError(f"{place}: is the same parameter as {first}; name each one once")


def _check_settings(settings: dict[str, Any]) -> None:
    """Raises TypeError, ValueError for parameters of the update rule."""
    for name, value in settings.items():
        if name == "betas":
            if not isinstance(value, Sequence) or len(value) != 2:
                raise TypeError(f"betas: must be two numbers, not {value!r}")
            for beta in value:
                _arguments.number(beta, "betas", below=1.0)
        elif name != "nesterov":
            _arguments.number(value, name)
    if settings.get("nesterov") and settings["momentum"] == 0:
        raise ValueError("nesterov: needs a momentum")
