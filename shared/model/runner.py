"""What the engine and the calibrator ask of a runner: parts of a model, run on demand over KV caches.

Two classes fulfil it: `ContiguousRunner`, whose caches are contiguous tensors, and `PagedRunner`, whose caches are
blocks of one pool. `shared.model.runners.make_runner` chooses between them.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from shared.model.cache import KVCache
from shared.model.gates import LayerCounters
from shared.model.loaded import LoadedModel
from shared.model.ragged import RaggedSequence
from shared.model.recorder import Work
from shared.model.regimes import Regimes

# States on a pass' way: depth -> [1, Q, D]. See `Runner.run`.
CapturedStates = dict[int, Tensor]


def captured_depths(num_layers: int) -> tuple[int, int]:
    """The depths below L at which passes can capture states: a third and two thirds of the layers, at least 1."""
    return max(1, round(num_layers / 3)), max(1, round(2 * num_layers / 3))


class Runner(Protocol):
    """Runs layers [first, last) of one model.

    Caches: every cache that is passed in comes from `new_cache` of the same runner. Threads: not thread-safe. Runners
    of one model share its gates, so one thread at a time uses all of them. Errors: methods that run layers raise
    `InvalidInput` (reason CACHE_CAPACITY) if the positions do not fit a cache. Errors of PyTorch, such as running out
    of memory, pass through.
    """

    @property
    def loaded(self) -> LoadedModel: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def tried_depth(self) -> int:
        """How deep passes go that try something: to where there have been layers of all kinds."""

    @property
    def counters(self) -> LayerCounters:
        """The layers that ran since the last reset."""

    @property
    def embedding_is_direct(self) -> bool:
        """Whether states at depth 0 are rows of the embedding, at every position."""

    @property
    def supports_ragged(self) -> bool:
        """Whether `run_ragged` works for this model. If not, each sequence needs a pass of its own."""

    @property
    def regimes(self) -> Regimes:
        """The lengths of sequences at which angles change."""

    @property
    def block_tokens(self) -> int:
        """Tokens per block of KV memory: 1 where memory is not given out in blocks."""

    @property
    def pass_sizes(self) -> tuple[int, ...]:
        """The numbers of tokens that passes are filled up to, ascending; () where a pass has as many as it is given."""

    @property
    def records(self) -> bool:
        """Whether passes are replayed without running their Python again."""

    @property
    def compiles(self) -> bool:
        """Whether layers run as compiled by torch.compile."""

    @property
    def why_not_recorded(self) -> str:
        """Why `records` is False. Empty if it is True, or if recording was switched off."""

    @property
    def why_not_compiled(self) -> str:
        """Why `compiles` is False. Empty if it is True, or if compiling was switched off."""

    @property
    def description(self) -> str:
        """How passes are run, for logs and reports."""

    def usable_bytes(self, num_bytes: int) -> int:
        """The bytes that all caches together can use, given a budget of `num_bytes` bytes."""

    def prepare(self, depths: Sequence[int]) -> Iterator[None]:
        """Does once what later passes between `depths` would otherwise do first.
        Yields between steps, so that other work can run."""

    def record(self, work: Work) -> Work:
        """A function that does again what `work` did, as `Recorder.record` makes it; `work` itself if this runner
        records nothing."""

    def ids(self, tokens: Sequence[int]) -> Tensor:
        """Token ids [1, T] int64 on the device where `run` and `run_ragged` read them."""

    def new_cache(self, capacity: int) -> KVCache:
        """A cache for at least `capacity` tokens of one sequence.

        Raises `Exhausted` (reason KV_PAGES) if the pool has too few free blocks, and `InvalidInput` (reason
        CACHE_CAPACITY) if `capacity` exceeds the context length of a paged runner.
        """

    def reserve(self, cache: KVCache) -> None:
        """Allocates all memory of a new cache now.
        Otherwise each layer's first pass allocates, when others may have taken the memory.

        Raises `Exhausted` (reason OUT_OF_MEMORY).
        """

    def run(
        self,
        token_ids: Tensor,
        cache: KVCache,
        *,
        first: int,
        last: int,
        base: int,
        hidden: Tensor | None = None,
        captured: CapturedStates | None = None,
        read_length: int | None = None,
    ) -> Tensor:
        """Runs layers [first, last) over tokens [1, Q] at positions [base, base + Q).

        `hidden` [1, Q, D]: the tokens' state at depth `first`; None if and only if `first` is 0. Returns their state at
        depth `last` [1, Q, D]. Token ids are always needed: some families derive positions or masks from them. A `base`
        smaller than the end of an earlier pass rolls the cache back.

        `captured`: the pass adds the states at those of the `captured_depths` that lie strictly between `first` and
        `last`. `read_length` as in `RaggedSequence`.
        """

    def run_ragged(
        self,
        token_ids: Tensor,
        sequences: Sequence[RaggedSequence],
        *,
        first: int,
        last: int,
        hidden: Tensor | None = None,
        captured: CapturedStates | None = None,
    ) -> Tensor:
        """Runs layers [first, last) over a ragged batch: tokens [1, T] of several sequences, one sequence after
        another, no padding.

        `hidden` [1, T, D]: the tokens' state at depth `first`; None if and only if `first` is 0. Returns their state at
        depth `last` [1, T, D]. `captured` as in `run`. To be called only if `supports_ragged`.
        """

    def embed(self, token_ids: Tensor, base: int = 0) -> Tensor:
        """The state at depth 0 [1, Q, D] of tokens [1, Q] at positions [base, base + Q). Runs no layer."""

    def embed_tokens(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """The states at depth 0 [N, D] of N tokens of any sequences, each at its own position. Runs no layer."""

    def logits(self, state: Tensor) -> Tensor:
        """States at depth L [..., D] -> float32 logits [..., V]."""

    def choices(self, states: Tensor) -> Tensor:
        """States at depth L [N, D] -> the token of each one's largest logit [N] int64, as `choosing.largest` has it."""
