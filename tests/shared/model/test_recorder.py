"""The tests' recorder fails where a CUDA graph would be wrong, and waits for the device are found, even without the
device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import MagicMock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shared.model.paged_pass import TokenBuffer, TokenPlaces
from shared.model.recorder import CudaRecorder, host_syncs
from tests.recorders import NotRecordable, TracingRecorder


def recorded(work: Callable[[], None]) -> Callable[[], None]:
    with torch.inference_mode():
        return TracingRecorder().record(work)


def test_a_replay_computes_anew_over_tensors_that_stay():
    source, target = torch.ones(4), torch.zeros(4)

    def work() -> None:
        middle = source * 2
        middle[1:] += 1
        target.copy_(middle.flip(0))

    replay = recorded(work)
    source.copy_(torch.arange(4.0))
    replay()
    assert target.tolist() == [7, 5, 3, 0]


def test_what_python_decided_stays_as_it_was():
    source, target, state = torch.ones(4), torch.zeros(4), {"at": 1}

    def work() -> None:
        target.fill_(0)
        target[state["at"]].copy_(source[0])

    replay = recorded(work)
    state["at"] = 3
    replay()
    assert target.tolist() == [0, 1, 0, 0]


def test_a_result_that_was_not_written_to_its_place_is_nonsense():
    source, kept = torch.ones(3), []
    replay = recorded(lambda: kept.append(source + 1))
    replay()
    assert torch.isnan(kept[0]).all()


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x[0] > 0),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
        lambda x: torch.rand(3) + x,
    ],
)
def test_what_a_graph_cannot_hold_is_refused(work):
    x = torch.ones(3)

    def once() -> None:
        work(x)

    with pytest.raises(NotRecordable):
        recorded(once)


def test_waits_are_found_without_a_gpu():
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(3, device="cuda")
        y = torch.empty(3, dtype=torch.int64, device="cuda")
        assert host_syncs(lambda: x.add_(1).mul(x.index_select(0, y)).softmax(-1)) == []
        assert host_syncs(lambda: (x + 1).cpu()) == ["aten._to_copy.default"]


@pytest.mark.parametrize("work", [lambda x: bool(x[0] > 0), lambda x: x[x > 0], lambda x: torch.where(x > 0)])
def test_waits_are_found_on_a_cpu(work):
    with torch.inference_mode():
        assert len(host_syncs(lambda: work(torch.ones(3)))) >= 1


class FakeCuda:
    """The parts of torch.cuda that `CudaRecorder` uses. `graph` ends as torch's does when a capture fails."""

    CUDAGraph = MagicMock

    def __init__(self, *, captures: bool = False) -> None:
        self.current: object = MagicMock()
        self._captures = captures
        self._device = 0
        self.made_on: list[tuple[str, int]] = []

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        held, self._device = self._device, device.index or 0
        try:
            yield
        finally:
            self._device = held

    def graph_pool_handle(self) -> int:
        self.made_on.append(("pool", self._device))
        return 7

    def Stream(self) -> object:  # noqa: N802
        self.made_on.append(("stream", self._device))
        return MagicMock()

    def empty_cache(self) -> None:
        self.made_on.append(("emptied", self._device))

    def current_device(self) -> int:
        return self._device

    def current_stream(self) -> object:
        return self.current

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        held, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = held

    @contextmanager
    def graph(self, graph: object, **options: object) -> Iterator[None]:
        held, self.current = self.current, options["stream"]
        self.made_on.append(("graph", self._device))
        yield
        if not self._captures:
            raise RuntimeError("capturing has failed")
        self.current = held


def test_all_of_a_recording_is_made_on_the_models_gpu(monkeypatch):
    """The engine's thread has the first GPU as its current one, whichever the model is on."""
    cuda = FakeCuda(captures=True)
    monkeypatch.setattr(torch, "cuda", cuda)
    work_on: list[int] = []
    recorder = CudaRecorder(torch.device("cuda:1"))
    recorder.record(lambda: work_on.append(cuda.current_device()))
    recorder.close()
    assert cuda.made_on == [("pool", 1), ("stream", 1), ("graph", 1), ("emptied", 1)]
    assert work_on == [1, 1]
    assert cuda.current_device() == 0


def test_a_recording_that_fails_leaves_the_current_stream(monkeypatch):
    cuda = FakeCuda()
    engines = cuda.current
    monkeypatch.setattr(torch, "cuda", cuda)
    recorder = CudaRecorder(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="capturing has failed"):
        recorder.record(lambda: None)
    assert cuda.current is engines


@pytest.mark.parametrize("ended", [False, True])
def test_a_capture_that_fails_gives_its_memory_back(monkeypatch, ended):
    """Where torch could not end the capture, it goes on allocating for it until it is told not to."""
    calls: list[tuple[str, int, object]] = []

    def end(device: int, pool: object) -> None:
        calls.append(("end", device, pool))
        if ended:
            raise RuntimeError("not currently recording to the pool")

    monkeypatch.setattr(torch, "cuda", FakeCuda())
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *args: calls.append(("release", *args)))
    with pytest.raises(RuntimeError, match="capturing has failed"):
        CudaRecorder(torch.device("cpu")).record(lambda: None)
    assert calls == [("end", 0, 7), ("release", 0, 7)][: 1 if ended else 2]


def test_inputs_are_padded_and_leave_nothing_of_the_pass_before():
    tokens = TokenBuffer(4, torch.device("cpu"))
    assert tokens.positions.tolist() == [-1] * 4
    tokens.fill(torch.tensor([7, 8, 9]), [4, 5, 0], TokenPlaces([1, 1, 2], [8, 8, 9], [0, 1, 1]))
    filled = [[7, 8, 9, 0], [4, 5, 0, 0], [1, 1, 2, -1], [8, 8, 9, 0], [0, 1, 1, 0]]
    assert tokens.stacked.tolist() == filled
    tokens.fill(torch.tensor([3]), [2], TokenPlaces([5], [6], [0]))
    assert tokens.stacked[:, 0].tolist() == [3, 2, 5, 6, 0]
    assert tokens.stacked[:, 1:].tolist() == [[-1 if row == 2 else 0] * 3 for row in range(5)]
