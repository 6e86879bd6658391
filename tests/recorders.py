"""A recorder for tests that is as strict on a CPU as a CUDA graph is on a GPU."""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shared.model.weights.lazy import LazyWeight

_FORBIDDEN = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_RANDOM = {torch.Tag.nondeterministic_seeded}


class NotRecordable(RuntimeError):
    """What a CUDA graph could not hold."""


class TracingRecorder:
    """Runs the work once, keeps its operators with their arguments, and replays these without any of its Python.

    Tensors that were there before keep their places; those that arise come anew in each replay, and what the recording
    itself made of them is wrecked: so a number that Python computed, a tensor that it made, a result that was not
    written to its place is the wrong number ever after. Reading a number on the host, sizes that depend on numbers and
    random draws are refused. `executed` counts the operators of all replays, `num_replays` the replays. `num_held`:
    recordings that somebody could still replay.
    """

    records = True

    def __init__(self) -> None:
        self.executed: Counter[str] = Counter()
        self.num_recorded = self.num_replays = 0
        self.is_closed = False
        self._held: weakref.WeakSet[Callable[[], None]] = weakref.WeakSet()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        with _Trace() as trace:
            assert work() is None
        trace.wreck()

        def replay() -> None:
            self.num_replays += 1
            with torch.inference_mode():
                self.executed.update(trace.replay())

        self._held.add(replay)
        return replay

    @property
    def num_held(self) -> int:
        return len(self._held)

    def close(self) -> None:
        assert not self._held
        self.is_closed = True


class _Trace(TorchDispatchMode):
    _whole: ClassVar[set[Any]] = set()  # operators that are not made of others

    def __init__(self) -> None:
        super().__init__()
        # Operators with their inputs: places of results made here, or what was there before.
        self._steps: list[tuple[Any, Any, list[int]]] = []
        self._executed: Counter[str] = Counter()
        self._places: dict[int, int] = {}  # id of a result -> its place
        self._results: list[Tensor] = []  # kept, so that no id comes twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in self._whole:
            with self:
                parts = NotImplemented if func.namespace != "aten" else func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
            self._whole.add(func)
        name = func._overloadpacket.__name__
        idle = name == "dropout" and not args[2]  # of a model that does not train
        if (_FORBIDDEN | _RANDOM) & set(func.tags) and not (idle or name.startswith("index")):
            raise NotRecordable(f"{func} cannot be recorded")
        if name in ("lift_fresh", "lift_fresh_copy", "lift"):
            raise NotRecordable("a tensor was made of the host's numbers")
        leaves = _leaves((args, kwargs or {}))
        inputs = _each((args, kwargs or {}), self._placed)
        if name.startswith(("index", "_index_put")):
            masks = [leaf for leaf in leaves[1:] if isinstance(leaf, Tensor)]
            if any(leaf.dtype in (torch.bool, torch.uint8) for leaf in masks):
                raise NotRecordable(f"{func} by a mask cannot be recorded")
        out = func(*args, **(kwargs or {}))
        produced = []
        given = {id(leaf) for leaf in leaves}
        for result in _leaves(out):
            if isinstance(result, Tensor) and id(result) not in given:
                self._places[id(result)] = len(self._results)
                self._results.append(result)
            if isinstance(result, Tensor):
                produced.append(self._places.get(id(result), -1))
        self._steps.append((func, inputs, produced))
        self._executed[name] += 1
        return out

    def _placed(self, leaf: Any) -> Any:
        return _Place(self._places[id(leaf)]) if isinstance(leaf, Tensor) and id(leaf) in self._places else leaf

    def wreck(self) -> None:
        """Nobody may read what the recording made: its storages that were not there before are filled with nonsense."""
        outer = {
            leaf.untyped_storage().data_ptr()
            for _, inputs, _ in self._steps
            for leaf in _leaves(inputs)
            if isinstance(leaf, Tensor) and not isinstance(leaf, LazyWeight)  # which has no storage
        }
        with torch.inference_mode():
            for result in self._results:
                if result.untyped_storage().data_ptr() in outer:
                    continue  # a view of what was there before
                result.fill_(float("nan") if result.is_floating_point() else 1)
        self._results = self._results[:0] + [torch.empty(0)] * len(self._results)
        self._places.clear()

    def replay(self) -> Counter[str]:
        results: dict[int, Tensor] = {}

        def found(leaf: Any) -> Any:
            return results[leaf.number] if type(leaf) is _Place else leaf

        for func, inputs, produced in self._steps:
            args, kwargs = _each(inputs, found)
            out = [result for result in _leaves(func(*args, **kwargs)) if isinstance(result, Tensor)]
            for place, result in zip(produced, out, strict=True):
                if place >= 0:
                    results[place] = result
        return self._executed


def _each(given: Any, change: Callable[[Any], Any]) -> Any:
    """What an operator takes, changed: lists at most, for which torch's own trees take most of a replay's time."""
    kind = type(given)
    if kind is dict:
        return {key: _each(each, change) for key, each in given.items()}
    return kind([_each(each, change) for each in given]) if kind is list or kind is tuple else change(given)


def _leaves(given: Any) -> list[Any]:
    found: list[Any] = []
    _each(given, found.append)
    return found


class _Place:
    """A result of an earlier operator."""

    def __init__(self, number: int) -> None:
        self.number = number
