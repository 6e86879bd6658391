"""A device whose work comes late, for steps that are launched before the last one has ended."""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.engine.ahead import graphs
from shared.engine.ahead.ahead import Ahead
from shared.engine.ahead.decoder import AheadDecoder
from shared.engine.ahead.slots import SlotMemory
from shared.model.paged_head import PagedHead
from shared.model.paged_kv import BlockPool, PagedCache
from shared.model.paged_runner import PagedRunner
from shared.model.recorder import Work
from shared.ops import slots
from tests.recorders import TracingRecorder


class LateDevice(TracingRecorder):
    """A device that does what it is told as late as it may, or at random moments before, in order. `replays`, `copies`
    and `others`: what a step has launched; `waits`: how often the host waited."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._queue: deque[Callable[[], object]] = deque()
        self.is_late = False
        self.counts: Counter[str] = Counter()

    def record(self, work: Work) -> Work:
        self.finish()
        replay = super().record(work)
        return lambda: self.launch("replays", replay)

    def launch(self, kind: str, work: Callable[[], object]) -> None:
        self.counts[kind] += 1
        self._queue.append(work)
        if not self.is_late:
            self.finish()
        while self._queue and self._random.random() < 0.3:
            self._queue.popleft()()

    def finish(self) -> None:
        while self._queue:
            with torch.inference_mode():
                self._queue.popleft()()


@contextmanager
def late(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All that steps launch goes to the device. What is not launched there, such as copies of prefixes, comes after
    it, as on a stream."""

    def after_all(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            device.finish()
            is_late, device.is_late = device.is_late, False
            try:
                return function(*arguments, **named)
            finally:
                device.is_late = is_late

        return called

    def launch(self: Ahead, *arguments: Any) -> Any:
        device.is_late = True
        try:
            return launched(self, *arguments)
        finally:
            device.is_late = False

    def wait(self: SlotMemory, place: int) -> None:
        device.counts["waits"] += 1
        device.finish()

    def copy(self: SlotMemory, into: Tensor, source: Tensor) -> None:
        device.launch("copies", lambda: into.copy_(source))

    plan, launched = slots.plan, Ahead.launch
    monkeypatch.setattr(Ahead, "launch", launch)
    monkeypatch.setattr(SlotMemory, "_copy", copy)
    monkeypatch.setattr(SlotMemory, "_wait", wait)
    monkeypatch.setattr(slots, "plan", lambda rows, args: device.launch("plans", lambda: plan(rows, args)))
    for owner, name in (
        (BlockPool, "table_index"),
        (PagedCache, "copy"),
        (PagedRunner, "_run_in_buckets"),
        (PagedHead, "_through"),
        (PagedRunner, "_fill_lane"),
        (graphs.LearnedMirror, "update"),
        (AheadDecoder, "_taken"),
    ):
        monkeypatch.setattr(owner, name, after_all(getattr(owner, name)))
    yield
    monkeypatch.undo()
