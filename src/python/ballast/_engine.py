"""The states behind an optimizer: one record per parameter, and the update that is running."""

from __future__ import annotations

import threading
import warnings
from typing import Any, Callable, Iterable, Iterator, Sequence

import torch

from . import _ballast, _dtensors, _guards
from ._gradients import TYPES, Collected, Gradients, arrays_of, parameters_to_hook
from ._loans import Loans

# Properties of the update rules, by name.
ROWS = _ballast.optimizer_rows()


def no_view() -> None:
    """A weak reference to nothing."""


class Record:
    """Properties of a parameter when it was added, and the place of its states. `key` is the
    parameter in the groups, `parameter` the tensor that is updated: of a DTensor the shard of this
    rank."""

    def __init__(self, parameter: torch.Tensor, name: str, first_element: int) -> None:
        self.key = parameter
        self.parameter = parameter = _dtensors.local(parameter)
        self.name = name
        self.first_element = first_element  # for stochastic rounding
        self.elements = 0 if torch.nn.parameter.is_lazy(parameter) else parameter.numel()
        self.dtype = parameter.dtype
        self.type = TYPES.get(self.dtype, "")
        self.group = 0  # number of its group in the present step
        self.as_before = False  # see Engine.follow
        self.states: _ballast.OptimizerStates | None = None  # None: it has not been updated yet
        self.number = 0  # in `states`
        self.steps = 0
        self.has_state = False
        self.deleted = False  # the user has deleted the state; a master may remain
        self.keeps_moments = True  # False without momentum
        self.mirror: torch.Tensor | None = None
        self.mirrored: tuple[Any, ...] = ()  # the memory that the mirror copies, and its version
        self.others: dict[str, Any] = {}  # further entries of the user in the optimizer's state
        self.view: Callable[[], Any] = no_view  # the object that users have for the state
        self.waiting: Any = None  # a state of another shape that a user has assigned
        self.summed: int | None = None  # see Ranks

    def begin_state(self) -> None:
        self.has_state = True
        self.deleted = False


class Engine:
    """Owns the records, the native states and the gradients in transit.

    It has no reference to its optimizer, whose end also ends this object. `options` are arguments
    of the native states.
    `least`: parameters with fewer elements have fp32 states in memory.
    """

    def __init__(self, rule: str, moments: str, options: dict[str, Any], least: int,
                 hook_mode: str | bool) -> None:
        self.rule = rule
        self.row = ROWS[rule]
        self.moments = moments
        self.records: dict[torch.Tensor, Record] = {}
        self.waiting: list[Record] = []  # records whose state has another shape
        self.updating = False
        self.gradients = Gradients(hook_mode)
        self.loans = Loans()
        self._options = options
        self._least = least
        self._hook_mode = hook_mode
        self._main: _ballast.OptimizerStates | None = None
        self._small: _ballast.OptimizerStates | None = None
        self._elements = 0
        self._dropped = 0  # elements of states whose parameters are gone
        self._uploads: dict[torch.Tensor, Record] = {}
        self._hidden: dict[torch.Tensor, torch.Tensor] = {}
        self._guarded: dict[torch.Tensor, Record] = {}
        self._lock = threading.RLock()

    # Parameters

    def add(self, named: Sequence[tuple[torch.Tensor, str]]) -> None:
        """Adds parameters, and states for those that require gradients. On failure nothing
        changes."""
        before = dict(self.records), self._elements
        try:
            for parameter, name in named:
                if parameter in self.records:  # it was in a group before, and keeps its state
                    self.records[parameter].name = name
                else:
                    self._record(parameter, name)
            new = [self.records[p] for p, _ in named if p.requires_grad]
            self.require(new)
            self.hook(record.key for record in new)
        except BaseException:
            self.records, self._elements = before
            raise

    def record(self, parameter: torch.Tensor) -> Record:
        """The record of a parameter. Makes a new one if the user has put the parameter into a group
        by hand."""
        found = self.records.get(parameter)
        if found is None:
            name = f"params: parameter {len(self.records)}"
            check_member(parameter, name)
            found = self._record(parameter, name)
        return found

    def records_in(self, groups: list[dict[str, Any]]) -> list[Record]:
        """The records of all parameters that have a gradient, in the order of the groups."""
        found = []
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    record = self.records.get(parameter) or self.record(parameter)
                    record.group = number
                    found.append(record)
        return found

    def _record(self, parameter: torch.Tensor, name: str) -> Record:
        record = self.records[parameter] = Record(parameter, name, self._elements)
        block = _ballast.ROUNDING_BLOCK
        self._elements += (record.elements + block - 1) // block * block
        return record

    def hook(self, parameters: Iterable[torch.Tensor]) -> None:
        self.gradients.hook(parameters_to_hook(parameters, self._hook_mode))

    def require(self, records: Iterable[Record]) -> None:
        """Makes states for those records that have none. The others are not changed."""
        missing = [r for r in records if r.states is None and r.elements > 0]
        small = [r for r in missing if r.elements < self._least]
        for some, main in (([r for r in missing if r.elements >= self._least], True), (small, False)):
            if not some:
                continue
            states, first = self._grow(some, main)
            for number, record in enumerate(some, first):
                record.states = states
                record.number = number

    def drop(self, records: Iterable[Record]) -> None:
        """Forgets parameters that the optimizer does not have any more. Their states are freed when
        they take as much as those of the others."""
        for record in records:
            self.synchronize()
            del self.records[record.key]
            self.gradients.drop(record.key)
            self.loans.forget(record)
            self._dropped += record.elements if record.states is not None else 0
        kept = sum(r.elements for r in self.records.values() if r.states is not None)
        if self._dropped >= max(kept, 1):
            self._convert()

    def _grow(self, records: list[Record], main: bool) -> tuple[_ballast.OptimizerStates, int]:
        described = [describe(record) for record in records]
        states = self._main if main else self._small
        if states is not None:
            self.synchronize()
            return states, states.add(described)
        states = self._make_states(described, main)
        if main:
            self._main = states
        else:
            self._small = states
        return states, 0

    def _make_states(self, described: list[Any], main: bool) -> _ballast.OptimizerStates:
        options = self._options if main else {**self._options, "paths": [], "host_bytes": None}
        moments = self.moments if main else "fp32"
        return _ballast.OptimizerStates(self.rule, moments, described, **options)

    def follow(self, records: Iterable[Record]) -> None:
        """Compares parameters with their records before anything is written, and converts the
        states of those whose type has changed. Raises ValueError, TypeError naming a parameter
        whose number of elements has changed or that cannot be updated.

        Sets `as_before`: the parameter is contiguous, on the CPU, and fits its states. The first
        condition below passes all such parameters that are nothing special, because thousands of
        small ones would take long otherwise."""
        changed = []
        for record in records:
            if record.parameter is not record.key:
                record.parameter = _dtensors.local(record.key)
            parameter = record.parameter
            record.as_before = (
                type(parameter) in _dtensors.PLAIN and parameter.layout is torch.strided
                and parameter.dtype is record.dtype and record.type != "" and parameter.is_cpu
                and parameter.is_contiguous() and parameter.numel() == record.elements > 0
                and not parameter.is_inference())
            if record.as_before:
                record.mirror = None
                continue
            check_parameter(parameter, record.name)
            if parameter.numel() != record.elements:
                raise ValueError(
                    f"{record.name}: has {parameter.numel()} elements now, and had {record.elements} "
                    "when the optimizer was made; make a new optimizer for the changed model")
            if parameter.dtype != record.dtype:
                changed.append(record)
        if changed:
            self.synchronize()
            self._convert()

    def _convert(self) -> None:
        """Makes states for the present types of all parameters, copies the old ones piece by piece,
        and replaces them at the end."""
        made: dict[Record, tuple[_ballast.OptimizerStates, int]] = {}
        kept: dict[bool, _ballast.OptimizerStates | None] = {True: None, False: None}
        for main in kept:
            some = [r for r in self.records.values()
                    if r.states is not None and (r.elements >= self._least) == main]
            if not some:
                continue
            states = kept[main] = self._make_states([describe(r, _present(r)) for r in some], main)
            for number, record in enumerate(some):
                made[record] = states, number
                if record.has_state and record.states is not None:
                    record.states.copy(record.number, states, number)
        self._main, self._small = kept[True], kept[False]
        self._dropped = 0
        for record, (states, number) in made.items():
            record.states, record.number = states, number
        for record in self.records.values():
            if record.dtype != _present(record):
                record.dtype = record.parameter.dtype
                record.type = TYPES.get(record.dtype, "")
                record.mirror = None

    # Weights

    def weights(self, record: Record) -> torch.Tensor:
        """The memory that the update changes. This is the parameter's own memory if it is on the
        CPU, otherwise a copy of the present weights."""
        parameter = record.parameter
        if parameter.device.type == "cpu" and parameter.is_contiguous():
            record.mirror = None
            own: torch.Tensor = parameter.detach()
            return own
        mirror = record.mirror
        place = memory_of(record)
        if mirror is None or mirror.shape != parameter.shape or mirror.dtype != parameter.dtype:
            with torch.inference_mode(False):
                mirror = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu",
                                     pin_memory=parameter.device.type == "cuda")
            record.mirror = mirror
        elif record.mirrored == place and parameter.device.type != "cpu":
            return mirror
        mirror.copy_(parameter.detach())
        record.mirrored = place
        return mirror

    def refresh(self, record: Record) -> None:
        """Uses the present weights of a 16-bit parameter as its master."""
        record.mirrored = ()
        if record.states is not None:
            self.synchronize()
            record.states.forget_master(record.number)

    def upload(self, record: Record) -> None:
        """Copies updated weights to a parameter whose memory the update cannot change itself."""
        if record.mirror is not None:
            record.parameter.data.copy_(record.mirror, non_blocking=True)

    # Steps

    def begin(self, groups: list[dict[str, Any]], gradients: Collected,
              hypers: list[_ballast.Hyper], overlap: bool) -> None:
        """Starts the update. The records of all gradients must have states, and follow() must have
        run. `overlap`: other code runs during the update."""
        records = [self.records[p] for p in gradients]
        keeps = [bool(group.get("momentum", 1) != 0) for group in groups]
        for record in records:
            if record.keeps_moments is not keeps[record.group]:
                self._keep_moments(record, keeps[record.group])
        pieces, others = _by_place(records)
        prepared = list(self._prepare(records, others, gradients, hypers, overlap))
        self.loans.end()
        self.updating = True
        for place, numbers in pieces:  # one block's weights in host memory at a time
            for states, arguments in self._prepare(records, numbers, gradients, hypers, overlap=False):
                states.begin(*arguments)
                del arguments  # which has the weights
            self._finish()
            self.updating = True
            place.put_back()
        for states, arguments in prepared:
            states.begin(*arguments)
        torch.autograd.graph.increment_version(list(gradients))
        for record in records:
            record.steps += 1
            record.has_state = True  # without a call, because there may be thousands
            record.deleted = False
            if record.mirror is not None:
                record.mirrored = memory_of(record)
                self._uploads[record.parameter] = record

    def _prepare(self, records: list[Record], among: Sequence[int], gradients: Collected,
                 hypers: list[_ballast.Hyper], overlap: bool
                 ) -> Iterator[tuple[_ballast.OptimizerStates, tuple[Any, ...]]]:
        """The arguments of OptimizerStates.begin() for the records with these numbers."""
        # Lists of numbers: a tuple for each of thousands of parameters would take longer.
        tensors = list(gradients.values())
        for states in (self._main, self._small):
            places = [i for i in among if records[i].states is states]
            if states is None or not places:
                continue
            some = [records[i] for i in places]
            weights = [r.parameter if r.as_before else self.weights(r) for r in some]
            in_use: list[Any] = [weights, tensors]
            if overlap:  # storages stay alive even if other code gives a tensor other memory
                in_use = [t.untyped_storage() for some_tensors in in_use for t in some_tensors]
            yield states, (
                [r.number for r in some],
                ([w.data_ptr() for w in weights], [r.elements for r in some], [r.type for r in some]),
                gradients.arrays(places), [r.steps + 1 for r in some], [r.group for r in some], hypers,
                in_use)

    def _keep_moments(self, record: Record, keep: bool) -> None:
        if keep:  # the momentum starts with this gradient
            self.write(record, {n: zeros_for(record) for n in self.moment_names()})
        record.keeps_moments = keep

    def guard(self, parameters: Iterable[torch.Tensor], hide: bool) -> None:
        """Makes later uses of these parameters wait. `hide` fills their memory with NaNs until
        then, so that a use that does not wait is noticed."""
        records = [self.records[p] for p in parameters
                   if self.records[p].states is not None and _guards.nvme_place_of(p) is None]
        if hide:
            self._finish()
            for record in records:
                data = record.parameter.data
                self._hidden[record.parameter] = data.clone()
                data.fill_(float("nan"))
            self.updating = True
        self._guarded = {record.parameter: record for record in records}
        _guards.guard(self._guarded, self.wait_for)

    def wait_for(self, parameter: torch.Tensor | None) -> None:
        """Returns when the parameter is updated, or all parameters for None."""
        with self._lock:
            record = None if parameter is None else self._guarded.get(parameter)
            if record is None or record.states is None:
                self.synchronize()
                return
            try:
                if parameter not in self._hidden:
                    record.states.wait(record.number)
                self._settle(record)
            except BaseException:
                self._release_all()
                raise

    def synchronize(self) -> None:
        """Returns when all parameters are updated."""
        with self._lock:
            if self.updating:
                self._finish()

    def _finish(self) -> None:
        self.updating = False
        try:
            for states in (self._main, self._small):
                if states is not None:
                    states.finish()
            for record in list(self._guarded.values()):
                self._settle(record)
            for record in self._uploads.values():
                self.upload(record)
        finally:
            self._release_all()

    def _settle(self, record: Record) -> None:
        parameter = record.parameter
        self._guarded.pop(parameter, None)
        _guards.release(parameter)
        if self._uploads.pop(parameter, None) is not None:
            self.upload(record)
        hidden = self._hidden.pop(parameter, None)
        if hidden is None:
            return
        untouched = bool(parameter.data.isnan().all())
        parameter.data.copy_(hidden)
        if not untouched:
            raise RuntimeError(f"{record.name}: was written while its update was running, by code "
                               "that does not wait; call synchronize() first")

    def _release_all(self) -> None:
        """After a failure, stops waiting for updates that will not come."""
        for parameter in self._guarded:
            _guards.release(parameter)
        for parameter, hidden in self._hidden.items():
            parameter.data.copy_(hidden)
        self._guarded = {}
        self._uploads = {}
        self._hidden = {}

    # States

    def moment_names(self) -> list[str]:
        return [name for name in self.row["moments"] if name]

    def names_of(self, record: Record) -> list[str]:
        """The entries of a parameter's state except "step"."""
        names = self.moment_names() if record.keeps_moments else []
        return [*names, "master"] if record.parameter.dtype != torch.float32 else names

    def read(self, record: Record, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Copies of these states: moments, or "master"; fp32, in host memory."""
        self.synchronize()
        self.loans.flush(record)
        self.follow([record])
        values = {name: zeros_for(record) for name in names}
        if values and record.states is not None:
            record.states.read(record.number, array_of(self.weights(record)),
                               *self._arrays(values))
        elif "master" in values:
            values["master"].copy_(record.parameter.detach())
        return values

    @torch.no_grad()
    def write(self, record: Record, values: dict[str, torch.Tensor],
              sets_weights: bool = True) -> None:
        """Replaces these states. A new master also sets the weights, or, without `sets_weights`,
        becomes that of equal weights: the next update uses it where the weights then are its
        rounded values."""
        self.synchronize()
        self.follow([record])
        self.require([record])
        record.begin_state()
        if record.states is None:
            return
        values = {name: _dtensors.local(value).detach().to("cpu", torch.float32).contiguous()
                  for name, value in values.items()}
        master, first, second = self._arrays(values)
        record.states.write(record.number, array_of(self.weights(record)), master, first, second,
                            sets_weights)
        if "master" in values and sets_weights:
            self.upload(record)

    def wait_with(self, record: Record, state: Any) -> None:
        """Keeps an assigned state that the parameter cannot have until the next step."""
        record.waiting = state
        self.waiting.append(record)

    def part_from_view(self, record: Record) -> None:
        """Lets the object that users have for the state keep its values, because the parameter gets
        another state."""
        view, waiting = record.view(), record.waiting
        record.view, record.waiting = no_view, None
        if view is not None and view is not waiting:
            view.take_away()

    def forget(self, record: Record) -> None:
        """Resets the moments. The master is a part of the weights and stays."""
        if record.states is not None and record.has_state:
            self.write(record, {n: zeros_for(record) for n in self.moment_names()})
        # torch's SGD accepts a state with only a master, its other optimizers do not.
        record.has_state = (record.has_state and "momentum" in self.row["parameters"]
                            and record.dtype != torch.float32)
        record.deleted = True
        record.steps = 0
        record.others = {}

    def _arrays(self, values: dict[str, torch.Tensor]) -> Iterator[Any]:
        for name in ("master", *self.row["moments"]):
            yield array_of(values[name]) if name in values else None

    def bytes_of(self, name: str) -> int:
        """`name`: "host_bytes" or "nvme_bytes"."""
        return sum(getattr(s, name) for s in (self._main, self._small) if s is not None)

    def gradient_stats(self, gradients: Collected | Iterable[torch.Tensor]) -> tuple[float, int]:
        """Sum of squares and number of non-finite values."""
        states = self._main if self._main is not None else self._small
        if states is None:
            return 0.0, 0
        return states.gradient_stats(gradients.arrays() if isinstance(gradients, Collected)
                                     else arrays_of(list(gradients)))

    def end(self) -> None:
        """Ends when the optimizer is deleted or the interpreter exits."""
        self.gradients.unhook()
        self.loans.end()
        try:
            self.synchronize()
        except RuntimeError as error:
            warnings.warn(f"the last optimizer step failed: {error}")


def array_of(tensor: torch.Tensor) -> tuple[int, int, str]:
    """A contiguous tensor in host memory, for native code."""
    return tensor.data_ptr(), tensor.numel(), TYPES[tensor.dtype]


def _by_place(records: list[Record]) -> tuple[list[tuple[_guards.Place, list[int]]], list[int]]:
    """Numbers of records whose weights are on NVMe, by place, and of all others."""
    if not _guards.any_guarded():
        return [], list(range(len(records)))
    pieces: dict[int, tuple[_guards.Place, list[int]]] = {}
    others = []
    for number, record in enumerate(records):
        place = _guards.nvme_place_of(record.parameter)
        if place is None:
            others.append(number)
        else:
            pieces.setdefault(id(place), (place, []))[1].append(number)
    return list(pieces.values()), others


def describe(record: Record, dtype: torch.dtype | None = None) -> tuple[int, str, int]:
    return record.elements, TYPES[dtype or record.dtype], record.first_element


def memory_of(record: Record) -> tuple[Any, ...]:
    """The memory of a parameter, and PyTorch's numbers of its changes: a DTensor and its shard have
    one each."""
    parameter = record.parameter
    return (parameter.device, parameter.data_ptr(), parameter.dtype, parameter.shape,
            parameter._version, record.key._version)


def zeros_for(record: Record) -> torch.Tensor:
    """Zeros for a state of the parameter, independent of torch's default type and device."""
    return torch.zeros(record.parameter.shape, dtype=torch.float32, device="cpu")


def _present(record: Record) -> torch.dtype:
    """The parameter's present type, if its states support it."""
    parameter = record.parameter
    fits = parameter.dtype in TYPES and parameter.numel() == record.elements
    return parameter.dtype if fits else record.dtype


def check_member(parameter: Any, name: str) -> None:
    """Raises TypeError, ValueError for what cannot be in a group. A frozen parameter may have any
    type, device and layout, since nothing reads it."""
    if not isinstance(parameter, torch.Tensor):
        raise TypeError(f"{name}: {type(parameter).__name__} is not a tensor")
    if parameter.requires_grad:
        check_parameter(parameter, name)


def has_no_updates(parameter: torch.Tensor) -> bool:
    """Whether the parameter is frozen and of a kind that cannot be trained, such as codes."""
    if parameter.requires_grad:
        return False
    try:
        check_parameter(parameter, "")
    except (TypeError, ValueError):
        return True
    return False


def check_parameter(parameter: torch.Tensor, name: str) -> None:
    """Raises TypeError, ValueError for a parameter that cannot be updated."""
    if _dtensors.is_dtensor(parameter):
        _dtensors.check(parameter, name)
        parameter = _dtensors.local(parameter)
    if torch.nn.parameter.is_lazy(parameter):
        raise TypeError(f"{name}: has no shape yet; run a forward pass before making the optimizer")
    if parameter.dtype not in TYPES:
        raise TypeError(f"{name}: {parameter.dtype} is not float32, bfloat16 or float16")
    if parameter.layout != torch.strided:
        raise TypeError(f"{name}: sparse parameters are not supported")
    if parameter.device.type not in ("cpu", "cuda"):
        raise TypeError(f"{name}: is on {parameter.device}, not on the CPU or a CUDA device")
    if parameter.is_inference():
        raise ValueError(f"{name}: was made in torch.inference_mode(), so it cannot be updated; "
                         "use a clone() made outside of it")
    if any(s == 0 and n > 1 for s, n in zip(parameter.stride(), parameter.shape)):
        raise ValueError(f"{name}: is expanded, so several elements share memory; use a contiguous() "
                         "copy")
