"""The executor on a GPU: passes over pages, of a few sizes, each recorded once and replayed.

A pass of N tokens runs in the smallest bucket that holds them; what is left over is padding. The smallest bucket is 16: reading the
weights takes as long for one token as for sixteen, and all passes of up to sixteen run the very same kernels over the very same
shapes, so that a token gets the same bits alone and in company. See docs/decisions/015.
"""

import logging
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from shared.errors import UnsupportedModel
from shared.model.cache import SlotCache
from shared.model.host_syncs import host_syncs
from shared.model.load import LoadedModel
from shared.model.packed import Segment
from shared.model.paged_check import CHECK_SLOTS, Probe
from shared.model.paged_kv import PAGE_SLOTS, LayerShape, PagedCache, PagePool, num_pages_of
from shared.model.paged_pass import LayerTransform, PagedForward, PassTokens, TokenBuffer
from shared.model.recorder import NoRecorder, Recorder, Work
from shared.model.runner import DepthRunner

logger = logging.getLogger(__name__)

BUCKETS = (16, 32, 64, 128, 256)
# Rows of logits at once: a row is as wide as the vocabulary.
HEAD_BUCKETS = (16, 32, 64)
# Positions beside the budget: for the check, and for what the engine measures and tests while requests hold all else.
RESERVED_SLOTS = CHECK_SLOTS


class PagedRunner(DepthRunner):
    """A `DepthRunner` whose caches are `PagedCache`s of one pool; a `SlotCache` runs the model's own way, as there.

    `kv_budget_bytes` are for caches, in whole pages, and RESERVED_SLOTS positions come on top. `recorder` makes passes replayable,
    `transform` is as in `PagedForward`; a model that works without one of them only is served so, which is logged, and told by
    `records` and `compiles`. Raises `UnsupportedModel` (reason PAGES_NOT_SUPPORTED) where passes over pages do not give the states that the
    model's own attention gives.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        kv_budget_bytes: int,
        recorder: Recorder,
        transform: LayerTransform | None = None,
    ) -> None:
        self._pool: PagePool | None = None
        super().__init__(loaded)
        probe = Probe(self)
        shapes = self._layer_shapes()
        page_bytes = sum(shape.page_bytes for shape in shapes)
        self.num_budget_pages = kv_budget_bytes // page_bytes
        self._pool = PagePool(
            shapes,
            self.num_budget_pages + num_pages_of(RESERVED_SLOTS),
            loaded.context_length,
            loaded.device,
        )
        self._make_buffers()
        self.can_pack = True
        self._recorder: Recorder = NoRecorder()
        self._use(None, checks=True)
        probe.compare(self.run_packed, self.new_cache, "paged attention")
        self.compiles = False
        if transform is not None:
            self.compiles = self._agrees(probe, transform, "compiled layers")
        chosen = transform if self.compiles else None
        if recorder.records and self._can_be_recorded():
            self._recorder = recorder
            if not self._agrees(probe, chosen, "recorded passes"):
                self._recorder = NoRecorder()
                self._use(chosen)  # drops what was recorded
                recorder.close()
        if not self.records:
            self._use(chosen)
        self.counters.reset()

    @property
    def page_slots(self) -> int:
        return PAGE_SLOTS

    @property
    def records(self) -> bool:
        """Whether passes are replayed without their Python."""
        return self._recorder.records

    @property
    def pool(self) -> PagePool:
        assert self._pool is not None
        return self._pool

    def usable_bytes(self, wanted: int) -> int:
        return self.num_budget_pages * self.pool.page_bytes

    def ids(self, tokens: Sequence[int]) -> Tensor:
        """[1, T] on the host: they go to the device with their positions, in one copy."""
        return torch.tensor([list(tokens)])

    def new_cache(self, capacity: int) -> SlotCache:
        """Raises `Exhausted` (reason KV_PAGES) where so many pages are not free."""
        if self._pool is None:
            return super().new_cache(capacity)
        return self._pool.new_cache(capacity)

    def reserve(self, cache: SlotCache) -> None:
        """Pages are taken when a cache is made."""
        if not isinstance(cache, PagedCache):
            super().reserve(cache)

    def prepare(self, depths: Sequence[int]) -> Iterator[None]:
        """Records the passes that requests will ask for: all sizes of the whole model, small ones between `depths`."""
        widest = min(BUCKETS[-1], self.loaded.context_length)
        for bucket in BUCKETS:
            if bucket <= max(widest, BUCKETS[0]):
                self._segment(0, self.num_layers, bucket)
                yield
        for bucket in HEAD_BUCKETS:
            self._head(bucket)
            yield
        stops = sorted({0, self.num_layers, *depths})
        for place, first in enumerate(stops):
            for last in stops[place + 1 :]:
                self._segment(first, last, BUCKETS[0])
                yield
        if not self._embedding_is_direct:
            self._segment(0, 0, BUCKETS[0])
            yield

    @torch.inference_mode()
    def run(
        self,
        token_ids: Tensor,
        cache: SlotCache,
        *,
        first: int,
        last: int,
        base: int,
        hidden: Tensor | None = None,
    ) -> Tensor:
        if not isinstance(cache, PagedCache):
            return super().run(token_ids, cache, first=first, last=last, base=base, hidden=hidden)
        assert token_ids.shape[0] == 1
        segment = Segment(cache, base, token_ids.shape[1])
        return self.run_packed(token_ids, [segment], first=first, last=last, hidden=hidden)

    @torch.inference_mode()
    def run_packed(
        self,
        token_ids: Tensor,
        segments: Sequence[Segment],
        *,
        first: int,
        last: int,
        hidden: Tensor | None = None,
    ) -> Tensor:
        assert (hidden is None) == (first == 0)
        assert 0 <= first < last <= self.num_layers
        owners: list[PagedCache] = []
        positions: list[int] = []
        for segment in segments:
            assert isinstance(segment.cache, PagedCache)
            segment.cache.begin(segment.base, segment.num_tokens)
            owners += [segment.cache] * segment.num_tokens
            positions += range(segment.base, segment.base + segment.num_tokens)
        entering = None if hidden is None else hidden[0]
        return self._pass(token_ids[0], owners, positions, first, last, entering)[None]

    @torch.inference_mode()
    def embed(self, token_ids: Tensor, base: int = 0) -> Tensor:
        if self._embedding_is_direct or self._pool is None:
            return super().embed(token_ids.to(self.loaded.device), base)
        count = token_ids.shape[1]
        return self._pass(token_ids[0], [], list(range(base, base + count)), 0, 0, None)[None]

    @torch.inference_mode()
    def embed_tokens(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        if self._embedding_is_direct or self._pool is None:
            return super().embed_tokens(tokens, positions)
        return self._pass(torch.tensor(tokens), [], list(positions), 0, 0, None)

    @torch.inference_mode()
    def logits(self, state: Tensor) -> Tensor:
        if self._pool is None:
            return super().logits(state)
        flat = state.reshape(-1, state.shape[-1])
        pieces = []
        for rows in flat.split(HEAD_BUCKETS[-1]):
            bucket = bucket_of(len(rows), HEAD_BUCKETS)
            replay = self._head(bucket)
            self._to_head[: len(rows)].copy_(rows)
            replay()
            pieces.append(self._logits[: len(rows)].clone())
        return _together(pieces).reshape(*state.shape[:-1], -1)

    @property
    def recorder(self) -> Recorder:
        """Of passes, and of whatever contains some: see `part`."""
        return self._recorder

    @torch.inference_mode()
    def part(self, tokens: PassTokens, entering: Tensor | None, first: int, last: int) -> Tensor:
        """Layers [first, last) over T tokens, for works that others record; `first` = `last` = 0 embeds. Counts nothing.

        `entering` [T, D] is the state at depth `first` (None only for depth 0). Returns that at depth `last` [T, D]. No more tokens
        than the largest bucket; their caches' rows as `pool.row_of` gives them.
        """
        if last == 0 and self._embedding_is_direct:
            rows: Tensor = self.loaded.parts.embedding(tokens.ids)
            return rows
        return self._forward.run(tokens, entering, first, last, checks=self._checks)

    # From here on: how.

    def _pass(
        self,
        ids: Tensor,
        owners: Sequence[PagedCache],
        positions: list[int],
        first: int,
        last: int,
        entering: Tensor | None,
    ) -> Tensor:
        """ids [T] and `entering` [T, D] -> the state at depth `last` [T, D], in passes of the largest bucket at most.

        A token sees those before it in its cache, so passes one after another do what one would.
        """
        pieces = []
        for start in range(0, len(positions), BUCKETS[-1]):
            piece = slice(start, start + BUCKETS[-1])
            count = len(positions[piece])
            bucket = bucket_of(count, BUCKETS)
            replay = self._segment(first, last, bucket)
            rows = [self.pool.row_of(owner) for owner in owners[piece]] or [0] * count
            self._tokens[bucket].fill(ids[piece], positions[piece], rows)
            if entering is not None:
                self._entering[:count].copy_(entering[piece])
            replay()
            self.counters.add(first, last, count)
            pieces.append(self._leaving[:count].clone())
        return _together(pieces)

    def _segment(self, first: int, last: int, bucket: int) -> Work:
        """The pass through layers [first, last) over one bucket, recorded if it has not been."""
        found = self._segments.get((first, last, bucket))
        if found is None:
            self._tokens[bucket].clear()  # nobody's page is written meanwhile
            work = partial(self._run_segment, first, last, bucket)
            found = self._segments[first, last, bucket] = self._recorder.record(work)
        return found

    @torch.inference_mode()
    def _run_segment(self, first: int, last: int, bucket: int) -> None:
        entering = self._entering[:bucket] if first else None
        state = self.part(self._tokens[bucket], entering, first, last)
        self._leaving[:bucket].copy_(state)

    def _head(self, bucket: int) -> Work:
        found = self._heads.get(bucket)
        if found is None:
            found = self._heads[bucket] = self._recorder.record(partial(self._run_head, bucket))
        return found

    @torch.inference_mode()
    def _run_head(self, bucket: int) -> None:
        self._logits[:bucket].copy_(super().logits(self._to_head[:bucket]))

    def _use(self, transform: LayerTransform | None, *, checks: bool = False) -> None:
        """From here on passes run so; none is recorded yet."""
        self._forward = PagedForward(self.loaded, self._gates, self.pool, transform)
        self._checks = checks
        self._segments: dict[tuple[int, int, int], Work] = {}
        self._heads: dict[int, Work] = {}

    def _agrees(self, probe: Probe, transform: LayerTransform | None, what: str) -> bool:
        """Whether passes are right with `transform` and the recorder there is; they stay so set up."""
        try:
            self._use(transform)
            probe.compare(self.run_packed, self.new_cache, what)
        except UnsupportedModel as error:
            logger.warning("%s is served without %s: %s", self.loaded.model_id, what, error.message)
            return False
        return True

    def _can_be_recorded(self) -> bool:
        self._use(None)
        self._tokens[BUCKETS[0]].clear()
        syncs = host_syncs(partial(self._run_segment, 0, self.num_layers, BUCKETS[0]))
        syncs += host_syncs(partial(self._run_head, HEAD_BUCKETS[0]))
        if syncs:
            logger.warning(
                "passes of %s are not recorded, and slower, for they wait for the device: %s",
                self.loaded.model_id,
                ", ".join(sorted(set(syncs))),
            )
        return not syncs

    def _layer_shapes(self) -> list[LayerShape]:
        """What the model's own attention puts into a cache, layer by layer."""
        shapes = []
        for index in range(self.num_layers):
            if index not in self._one_slot:
                raise UnsupportedModel(
                    f"layer {index} of {self.loaded.architecture} keeps no keys and values of its own",
                    reason="PAGES_NOT_SUPPORTED",
                )
            keys, values = self._one_slot[index]
            shapes.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype))
        return shapes

    @torch.inference_mode()
    def _make_buffers(self) -> None:
        device, dtype = self.loaded.device, self.loaded.model.dtype
        width = self.loaded.hidden_size
        self._tokens = {bucket: TokenBuffer(bucket, device) for bucket in BUCKETS}
        self._entering = torch.zeros(BUCKETS[-1], width, dtype=dtype, device=device)
        self._leaving = torch.zeros_like(self._entering)
        self._to_head = torch.zeros(HEAD_BUCKETS[-1], width, dtype=dtype, device=device)
        self._logits = torch.zeros(HEAD_BUCKETS[-1], self.loaded.vocabulary_size, device=device)


def bucket_of(count: int, buckets: Sequence[int]) -> int:
    """The smallest of the ascending `buckets` that holds so many."""
    return next(bucket for bucket in buckets if bucket >= count)


def _together(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
