"""The final norm and the head of a paged runner: passes over a few numbers of rows, each recorded once."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from shared.model.choosing import drawn_or_largest, largest
from shared.model.contiguous_runner import GatedModel
from shared.model.inference import inference
from shared.model.loaded import LoadedModel
from shared.model.recorder import NoRecorder, Recorder, Work

# Rows of logits at once. Fewer sizes than passes have, because a row is as wide as the vocabulary: the head's weights
# are read once.
HEAD_BUCKETS = (16, 32, 64, 128, 256)
# Rows of float64 that are drawn from at once.
DRAWN_ROWS = 32


class PagedHead:
    """`sizes`: the numbers of rows that go through the head at once, ascending."""

    @inference
    def __init__(self, model: GatedModel, loaded: LoadedModel) -> None:
        self._model = model
        # Some heads run as a pass of the whole model does, over no more rows than its context has positions.
        fitting = tuple(bucket for bucket in HEAD_BUCKETS if bucket <= loaded.context_length)
        self.sizes = fitting or HEAD_BUCKETS[:1]
        rows, device = self.sizes[-1], loaded.device
        self._entering = torch.zeros(rows, loaded.hidden_size, dtype=loaded.model.dtype, device=device)
        self._logits = torch.zeros(rows, loaded.vocabulary_size, device=device)
        self._chosen = torch.zeros(rows, dtype=torch.int64, device=device)
        self.set_up(NoRecorder())

    def set_up(self, recorder: Recorder) -> None:
        """Records later passes with `recorder`, and drops all that are recorded."""
        self._recorder = recorder
        self._passes: dict[tuple[int, str], Work] = {}

    def record_all(self) -> Iterator[None]:
        """Makes one recording at each step."""
        for size in self.sizes:
            for work in (self._run, self._choose):
                self._recorded(size, work)
                yield

    def smallest(self) -> Sequence[Work]:
        """What the smallest passes do, not recorded."""
        return [partial(work, self.sizes[0]) for work in (self._run, self._choose)]

    @inference
    def logits(self, states: Tensor) -> Tensor:
        """States [.., D] -> logits [.., V]."""
        rows = self._through(states.reshape(-1, states.shape[-1]), self._logits, self._run)
        return rows.reshape(*states.shape[:-1], -1)

    @inference
    def choices(self, states: Tensor) -> Tensor:
        """States [N, D] -> the tokens of the largest logits [N]."""
        return self._through(states, self._chosen, self._choose)

    def choose(self, states: Tensor, drawing: Tensor | None) -> Tensor:
        """The tokens chosen after states [N, D], without a recording of its own [N]: those of the largest logits, or
        with `drawing` [3, N] as `drawn_or_largest` has them."""
        if drawing is None:
            return largest(self._model.logits(states, widens=False))
        # Masses are four times as large as logits, so they are made of a few rows at once.
        parts = zip(self._model.logits(states).split(DRAWN_ROWS), drawing.split(DRAWN_ROWS, 1), strict=True)
        return joined([drawn_or_largest(logits, *numbers.unbind()) for logits, numbers in parts])

    def _through(self, states: Tensor, result: Tensor, work: Callable[[int], None]) -> Tensor:
        """States [N, D] -> what recorded `work` leaves in `result` [256, ..] of them, [N, ..]."""
        pieces = []
        for rows in states.split(self.sizes[-1]):
            replay = self._recorded(bucket_of(len(rows), self.sizes), work)
            self._entering[: len(rows)].copy_(rows)
            replay()
            pieces.append(result[: len(rows)].clone())
        return joined(pieces)

    def _recorded(self, bucket: int, work: Callable[[int], None]) -> Work:
        """The final norm, the head and what follows over one bucket of states. Records them at the first call."""
        key = bucket, work.__name__
        if key not in self._passes:
            self._passes[key] = self._recorder.record(partial(work, bucket))
        return self._passes[key]

    @inference
    def _run(self, bucket: int) -> None:
        self._logits[:bucket].copy_(self._model.logits(self._entering[:bucket]))

    @inference
    def _choose(self, bucket: int) -> None:
        self._chosen[:bucket].copy_(largest(self._model.logits(self._entering[:bucket], widens=False)))


def bucket_of(count: int, buckets: Sequence[int]) -> int:
    """The smallest of the ascending `buckets` that holds `count`."""
    return next(bucket for bucket in buckets if bucket >= count)


def joined(pieces: list[Tensor]) -> Tensor:
    """The rows of all pieces; a single one as it is."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
