"""The processes that run one model together: what they tell each other, and sums in one fixed order."""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shared import ops
from shared.errors import PreconditionFailed, Unavailable

# A message goes in one broadcast if it has no more bytes than this, and its length.
MESSAGE_BYTES, LENGTH_BYTES = 8192, 8
# Numbers from which on a sum of more than two ranks is shared out: less goes over the wires, in one more round.
SHARED_OUT_NUMBERS = 1 << 18
# While nobody asks anything, ranks wait for a message.
_FOR_EVER = timedelta(days=3650)
# The name that torch 2.13 gives it; earlier ones know only the other.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
TCPStore: Any = vars(dist)["TCPStore"]  # which torch's types do not show


def first_store(size: int) -> Any:
    """Where ranks on this machine find each other, at a free port: for rank 0's `join_ranks`. `port`: the others'."""
    return TCPStore("127.0.0.1", 0, size, True, wait_for_workers=False)


class Ranks:
    """This process among `size`, numbered `rank` from 0 on. Made by `join_ranks`. One thread at a time uses it."""

    def __init__(self, pass_timeout_s: float, device: str) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = device
        self._messages = dist.new_group(backend="gloo", timeout=_FOR_EVER)
        self._pass_timeout_s = pass_timeout_s
        self._passes: dist.ProcessGroup | None = None  # while the model is loaded, the default group with its timeout
        self._buffer = torch.zeros(LENGTH_BYTES + MESSAGE_BYTES, dtype=torch.uint8)

    def begin_passes(self) -> None:
        """From now on a rank that does not do its part within the time of a pass fails the others. All ranks call
        it."""
        self._passes = dist.new_group(timeout=timedelta(seconds=self._pass_timeout_s))

    def total(self, part: Tensor) -> Tensor:
        """The sum of all ranks' `part`, added in the order of the ranks: the bits of a number depend neither on its
        place nor on what else is in the tensor, which those of all_reduce do."""
        if self.size > 2 and part.numel() >= SHARED_OUT_NUMBERS:
            return self._total_shared_out(part)
        return _added(self._gathered(part))

    def joined(self, part: Tensor) -> Tensor:
        """All ranks' `part` [..., n], one after another [..., N n]."""
        return torch.cat(self._gathered(part).unbind(), -1)

    def _gathered(self, part: Tensor) -> Tensor:
        """[N, ...]"""
        parts = part.new_empty((self.size, *part.shape))
        _all_gather(parts.view(-1), part.reshape(-1), group=self._passes)
        return parts

    def _total_shared_out(self, part: Tensor) -> Tensor:
        """As `total`: each rank adds one slice for all."""
        flat = part.reshape(-1)
        padded = F.pad(flat, (0, -len(flat) % self.size))
        mine = torch.empty_like(padded)
        dist.all_to_all_single(mine, padded, group=self._passes)
        return self._gathered(_added(mine.view(self.size, -1))).view(-1)[: len(flat)].view(part.shape)

    def tell(self, message: Any) -> None:
        """Sends what JSON can hold to all other ranks. For rank 0."""
        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        self._buffer[:LENGTH_BYTES] = torch.tensor([len(data)]).view(torch.uint8)
        self._buffer[LENGTH_BYTES : LENGTH_BYTES + len(data)] = data[:MESSAGE_BYTES]
        self._send(self._buffer)
        if len(data) > MESSAGE_BYTES:
            self._send(data[MESSAGE_BYTES:])

    def hear(self) -> Any:
        """What rank 0 tells. Blocks until it does. For the others."""
        self._send(self._buffer)
        length = int(self._buffer[:LENGTH_BYTES].view(torch.int64))
        data = self._buffer[LENGTH_BYTES : LENGTH_BYTES + length]
        if length > MESSAGE_BYTES:
            rest = torch.empty(length - MESSAGE_BYTES, dtype=torch.uint8)
            self._send(rest)
            data = torch.cat([data, rest])
        return json.loads(data.numpy().tobytes())

    def _send(self, data: Tensor) -> None:
        dist.broadcast(data, 0, group=self._messages)

    def send_states(self, states: Tensor) -> None:
        """Makes `states` those of rank 0, everywhere."""
        dist.broadcast(states, 0, group=self._passes)

    def check_alike(self, facts: dict[str, str]) -> None:
        """As the function `check_alike`, with facts about this machine beside those given. All ranks call it."""
        theirs: list[Any] = [None] * self.size
        dist.all_gather_object(theirs, facts | {"cpu_path": ops.cpu_bits(), "torch": torch.__version__})
        check_alike(theirs)


def check_alike(facts: Sequence[Mapping[str, str]]) -> None:
    """Raises `PreconditionFailed` (reason RANKS_DIFFER) unless all ranks have the same `facts`, by rank."""
    for rank, theirs in enumerate(facts):
        for name in {**facts[0], **theirs}:
            if (value := theirs.get(name)) != (first := facts[0].get(name)):
                raise PreconditionFailed(
                    f"the ranks differ in their {name.replace('_', ' ')}: rank 0 has {first}, rank {rank} has {value}. "
                    "All must run the same release with the same settings and models",
                    reason="RANKS_DIFFER",
                    metadata={"rank": str(rank), "differs": name},
                )


def not_met(size: int, timeout_s: float, error: Exception) -> Unavailable:
    """Why ranks have not begun."""
    rank, address, port = map(os.environ.get, ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    return Unavailable(
        f"the {size} ranks have not met at {address}:{port} within {timeout_s:g} s; rank {rank} gives up: "
        f"{first_line(error)}",
        reason="RANKS_MISSING",
    )


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def join_ranks(size: int, *, device: str, timeout_s: float, pass_timeout_s: float, store: Any = None) -> Ranks:
    """Waits for the other ranks, which the environment names as torchrun sets it. `store`: that of this process, if it
    has none of torchrun's. `timeout_s`: how long ranks wait for each other until `Ranks.begin_passes`.

    Raises `Unavailable` (reason RANKS_MISSING) if they do not all come, and `PreconditionFailed` (reason RANKS_DIFFER)
    if they are others than `size`.
    """
    rank, found = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if found != size:
        raise PreconditionFailed(
            f"the launcher has started {found} ranks, but --tensor-parallel is {size}", reason="RANKS_DIFFER"
        )
    timeout = timedelta(seconds=timeout_s)
    try:
        if store is None and "TORCHELASTIC_RUN_ID" not in os.environ:
            store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, False, timeout)
        dist.init_process_group(
            "nccl" if device.startswith("cuda") else "gloo",
            rank=rank,
            world_size=size,
            timeout=timeout,
            store=store,
        )
        return Ranks(pass_timeout_s, device)
    except (RuntimeError, ValueError) as error:  # torch's own errors of its store and backends are RuntimeErrors
        raise not_met(size, timeout_s, error) from error


def _added(parts: Tensor) -> Tensor:
    """[N, ...] -> [...]"""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
