"""The processes that calibrate together, the ranks, and what they tell each other: by torch.distributed, started by
torchrun or as it starts them (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shared.errors import Unavailable
from shared.model.ranks.group import check_alike, first_line, not_met

T = TypeVar("T")
# How long a rank that has done its part waits for the first one, which measures and publishes.
LONGEST_END_S = 86_400.0


class Ranks:
    """One rank alone, which hears what it says. All ranks must call the same methods in the same order.

    With others (`JoinedRanks`) every method raises `Unavailable` (RANK_LOST) if one of them ends or does not answer.
    """

    rank, size = 0, 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def everyones(self, value: T) -> list[T]:
        """What each rank gives, by rank."""
        return [value]

    def firsts(self, value: T) -> T:
        """What the first rank gives."""
        return value

    def others(self, value: T) -> Iterator[T]:
        """At the first rank what each of the others gives, one at a time in memory; nothing elsewhere."""
        return iter(())

    def add(self, tensor: Tensor) -> None:
        """`tensor` becomes the sum over all ranks."""

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Each of the float32 `tensors` becomes its mean over all ranks."""

    def means(self, values: Sequence[float]) -> list[float]:
        """The mean of each number over all ranks."""
        return list(values)

    def end(self) -> None:
        """Waits until all ranks are at their ends. A rank that is lost can only be started again with all others, so
        none of them ends before."""

    def check(self, **identity: object) -> None:
        """Raises `PreconditionFailed` (RANKS_DIFFER) unless all ranks are the same in everything that is named."""
        check_alike(self.everyones({name: str(value) for name, value in identity.items()}))


class JoinedRanks(Ranks):
    """This process among the others of its process group. Values are pickled: ranks trust each other, and their
    network. Tensors of a GPU are added on the host."""

    def __init__(self, timeout_s: float) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._timeout_s = timeout_s

    def everyones(self, value: T) -> list[T]:
        values: list[T | None] = [None] * self.size
        with self._waiting():
            dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def firsts(self, value: T) -> T:
        values = [value if self.is_first else None]
        with self._waiting():
            dist.broadcast_object_list(values)
        return values[0]  # type: ignore[return-value]

    def others(self, value: T) -> Iterator[T]:
        if self.is_first:
            return self._received()
        with self._waiting():
            dist.send_object_list([value], dst=0)
        return iter(())

    def _received(self) -> Iterator[T]:
        for rank in range(1, self.size):
            values: list[T | None] = [None]
            with self._waiting(meets=rank == 1):
                dist.recv_object_list(values, src=rank)
            yield values[0]  # type: ignore[misc]

    def add(self, tensor: Tensor) -> None:
        on_host = tensor.cpu()
        with self._waiting():
            dist.all_reduce(on_host)
        if on_host is not tensor:
            tensor.copy_(on_host)

    def average(self, tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
        # Called in every step of a training: who is missing is not asked for beforehand.
        with self._waiting(meets=False):
            dist.all_reduce(flat)
        flat /= self.size
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))

    def means(self, values: Sequence[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        with self._waiting(meets=False):
            dist.all_reduce(tensor)
        means: list[float] = (tensor / self.size).tolist()
        return means

    def end(self) -> None:
        with self._waiting(timeout_s=max(self._timeout_s, LONGEST_END_S)):
            pass

    @contextmanager
    def _waiting(self, *, meets: bool = True, timeout_s: float | None = None) -> Iterator[None]:
        """`meets`: waits for all ranks first, which names one that does not come."""
        timeout_s = timeout_s or self._timeout_s
        try:
            if meets:
                dist.monitored_barrier(timeout=timedelta(seconds=timeout_s), wait_all_ranks=True)
            yield
        except RuntimeError as error:  # all that torch.distributed raises
            raise Unavailable(
                f"another rank of this calibration has ended or did not answer within {timeout_s:.0f} s, so rank "
                f"{self.rank} cannot go on: {self._closed()}{first_line(error)}",
                reason="RANK_LOST",
            ) from error

    def _closed(self) -> str:
        """The ranks whose connections are closed, in words. What torch raises then has their addresses alone. Nobody
        hears what the others are sent here: this rank ends."""
        closed = []
        for rank in range(self.size):
            try:
                if rank != self.rank:
                    dist.isend(torch.zeros(1), rank)
            except RuntimeError:
                closed.append(str(rank))
        return f"Ranks {', '.join(closed)} have ended: " if closed else ""


@contextmanager
def joined(timeout_s: float) -> Iterator[Ranks]:
    """Scope of the process group that the environment describes; one rank alone if it describes none. A rank waits at
    most `timeout_s` for the others, here and later. Raises `Unavailable` (RANKS_MISSING)."""
    if (size := int(os.environ.get("WORLD_SIZE", "1"))) < 2:
        yield Ranks()
        return
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:  # also DistNetworkError and a variable that is missing
        raise not_met(size, timeout_s, error) from error
    try:
        yield JoinedRanks(timeout_s)
    finally:
        dist.destroy_process_group()


def least_loaded(loads: Iterable[int]) -> int:
    """The rank with the least to do, of equals the first."""
    each = list(loads)
    return each.index(min(each))
