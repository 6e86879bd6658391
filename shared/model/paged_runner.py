"""The runner over paged KV, for GPUs: passes of a few fixed sizes, each recorded once as a CUDA graph and replayed.

A pass of N tokens runs in the smallest bucket that holds N; the rest of the bucket is padding. The smallest bucket is
16: reading the weights takes as long for one token as for sixteen. All passes of up to sixteen tokens run the same
kernels over the same shapes, so a token gets the same bits alone and in a batch. See docs/decisions/008.
"""

import logging
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from shared.errors import UnsupportedModel
from shared.model.cache import KVCache
from shared.model.contiguous_runner import GatedModel
from shared.model.gates import LayerCounters
from shared.model.inference import inference
from shared.model.loaded import LoadedModel
from shared.model.model_checks import CHECK_TOKENS, StateCheck, check_cuts
from shared.model.paged_head import PagedHead, bucket_of, joined
from shared.model.paged_kv import BLOCK_TOKENS, BlockPool, LayerShape, PagedCache, as_paged, num_blocks_of
from shared.model.paged_pass import LayerTransform, PagedForward, TokenBuffer, TokenPlaces
from shared.model.ragged import RaggedSequence
from shared.model.recorder import NoRecorder, Recorder, Work, host_syncs
from shared.model.regimes import Regimes
from shared.model.runner import CapturedStates, captured_depths
from shared.ops.paged_on_gpu import has_triton

logger = logging.getLogger(__name__)

# Finer beyond that: padding is computed like the rest, and a planned step of 42 tokens would pay for 64.
BUCKETS = (16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)
# Tokens of a chunk of a long prompt: it has a pass of its own, without logits.
LANE_SIZES = (512, 1024, 2048)
# Tokens on top of the budget: for the check, and for what the engine measures and tests while requests hold all other
# blocks.
RESERVED_TOKENS = CHECK_TOKENS


class PagedRunner:
    """A `Runner` whose caches are `PagedCache`s of one pool.

    `kv_budget_bytes`: for caches, in whole blocks. RESERVED_TOKENS tokens come on top. `recorder` makes passes
    replayable; `transform` is as in `PagedForward`. If one of the two does not work for the model, the runner works
    without it: a warning is logged, `records` or `compiles` is False, and `why_not_recorded` or `why_not_compiled`
    gives the reason. Raises `UnsupportedModel` (reason PAGES_NOT_SUPPORTED) if passes over paged KV do not give the
    states of the model's own attention.
    """

    supports_ragged = True
    block_tokens = BLOCK_TOKENS
    pass_sizes = BUCKETS

    def __init__(
        self, loaded: LoadedModel, *, kv_budget_bytes: int, recorder: Recorder, transform: LayerTransform | None = None
    ) -> None:
        self.loaded = loaded
        # Passes are recorded for all layers.
        self.num_layers = self.tried_depth = loaded.num_layers
        self._model = GatedModel(loaded)
        check_cuts(self._model)
        check = StateCheck(self._model)
        shapes = self._layer_shapes()
        self.num_budget_blocks = kv_budget_bytes // sum(shape.block_bytes for shape in shapes)
        self.pool = BlockPool(
            shapes,
            self.num_budget_blocks + num_blocks_of(max(RESERVED_TOKENS, check.num_tokens)),
            loaded.context_length,
            loaded.device,
        )
        self._make_buffers()
        self._head = PagedHead(self._model, loaded)
        self._recorder: Recorder = NoRecorder()
        self._set_up(None, checks=True)
        check.compare(self.run_ragged, self.new_cache, "paged attention")
        self.why_not_recorded = self.why_not_compiled = ""
        self.compiles = False
        if transform is not None:
            self.why_not_compiled = self._why_not(check, transform, "compiled layers")
            self.compiles = not self.why_not_compiled
        chosen = transform if self.compiles else None
        if recorder.records:
            self.why_not_recorded = self._waits_for_device()
        if recorder.records and not self.why_not_recorded:
            self._recorder = recorder
            self.why_not_recorded = self._why_not(check, chosen, "recorded passes")
            if self.why_not_recorded:
                self._recorder = NoRecorder()
                self._set_up(chosen)  # drops what was recorded
                recorder.close()
        if not self.records:
            self._set_up(chosen)
        self.counters.reset()

    @property
    def counters(self) -> LayerCounters:
        return self._model.counters

    @property
    def regimes(self) -> Regimes:
        return self._model.regimes

    @property
    def records(self) -> bool:
        return self._recorder.records

    @property
    def embedding_is_direct(self) -> bool:
        return self._model.embedding_is_direct

    @property
    def description(self) -> str:
        recorded = "recorded" if self.records else "not recorded"
        compiled = "compiled" if self.compiles else "not compiled"
        by = "kernels" if has_triton() else "torch"
        return f"over {self.pool.num_blocks} blocks of KV memory, {recorded}, layers {compiled}, attention by {by}"

    def usable_bytes(self, num_bytes: int) -> int:
        return self.num_budget_blocks * self.pool.block_bytes

    def record(self, work: Work) -> Work:
        return self._recorder.record(work)

    def ids(self, tokens: Sequence[int]) -> Tensor:
        """Token ids [1, T] on the host: a pass copies them to the device together with their positions."""
        return torch.tensor([list(tokens)])

    def new_cache(self, capacity: int) -> PagedCache:
        return self.pool.new_cache(capacity)

    def reserve(self, cache: KVCache) -> None:
        """Does nothing: a cache takes its blocks when it is made."""

    def prepare(self, depths: Sequence[int]) -> Iterator[None]:
        """Records the passes that requests will need: every bucket for the whole model, the smallest between
        `depths`."""
        widest = min(BUCKETS[-1], self.loaded.context_length)
        for bucket in BUCKETS:
            if bucket <= max(widest, BUCKETS[0]):
                self._recorded_layers(0, self.num_layers, bucket)
                yield
        yield from self._head.record_all()
        stops = sorted({0, self.num_layers, *depths})
        for place, first in enumerate(stops):
            for last in stops[place + 1 :]:
                self._recorded_layers(first, last, BUCKETS[0])
                yield
        if not self._model.embedding_is_direct:
            self._recorded_layers(0, 0, BUCKETS[0])
            yield

    @inference
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
        assert token_ids.shape[0] == 1
        sequence = RaggedSequence(cache, base, token_ids.shape[1], read_length=read_length)
        return self.run_ragged(token_ids, [sequence], first=first, last=last, hidden=hidden, captured=captured)

    @inference
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
        caches: list[PagedCache] = []
        places = TokenPlaces()
        for sequence in sequences:
            cache = as_paged(sequence.cache)
            cache.begin(sequence.base, sequence.num_tokens)
            caches += [cache] * sequence.num_tokens
            places.positions += range(sequence.base, sequence.base + sequence.num_tokens)
            places.seen_at += range(sequence.span.start, sequence.span.end)
            if self.regimes.are_several:
                places.regimes += map(self.regimes.of, sequence.lengths)
            else:
                places.regimes += [0] * sequence.num_tokens
        entering = None if hidden is None else hidden[0]
        out = self._run_in_buckets(token_ids[0], caches, places, first, last, entering, captured)
        return out[None]

    @inference
    def embed(self, token_ids: Tensor, base: int = 0) -> Tensor:
        if self._model.embedding_is_direct:
            return self._model.embed(token_ids.to(self.loaded.device), base)
        places = TokenPlaces.without_layers(range(base, base + token_ids.shape[1]))
        return self._run_in_buckets(token_ids[0], [], places, 0, 0, None)[None]

    @inference
    def embed_tokens(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        if self._model.embedding_is_direct:
            return self.embed(self.ids(tokens))[0]
        places = TokenPlaces.without_layers(positions)
        return self._run_in_buckets(torch.tensor(tokens), [], places, 0, 0, None)

    @property
    def head_sizes(self) -> Sequence[int]:
        """The numbers of rows that go through the head at once, ascending."""
        return self._head.sizes

    def logits(self, state: Tensor) -> Tensor:
        return self._head.logits(state)

    def choices(self, states: Tensor) -> Tensor:
        return self._head.choices(states)

    def token_buffer(self, size: int) -> TokenBuffer:
        """The tokens of a pass of this size."""
        return self._tokens[size]

    def recorded_pass(self, size: int) -> Work:
        """Takes the tokens in the buffer of this size through all layers. To ask for it may clear the buffer."""
        return self._recorded_layers(0, self.num_layers, size)

    @inference
    def read(self, size: int, tokens: Sequence[int], cache: PagedCache | None, base: int) -> None:
        """Takes a chunk of a prompt, no more tokens than `size`, one of `lane_sizes`, through all layers, from position
        `base` of a cache on. None is told their states. Records the pass at the first call."""
        if size not in self._lane:
            self._tokens[size].clear()
            self._lane[size] = self._recorder.record(partial(self._run_lane, size))
        if cache is not None:
            self._fill_lane(size, tokens, self.pool.table_index(cache), base)
            self.counters.add(0, self.num_layers, len(tokens))
        self._lane[size]()

    def waited_read(self, size: int) -> None:
        """A chunk of padding, for the time that it takes."""
        self._tokens[size].clear()
        self.read(size, (), None, 0)
        self._leaving[0, 0].tolist()  # waits

    def drop_lane(self) -> None:
        """Frees what `read` has recorded."""
        self._lane.clear()

    def _fill_lane(self, size: int, tokens: Sequence[int], table: int, base: int) -> None:
        places = TokenPlaces.without_layers(range(base, base + len(tokens)))
        self._tokens[size].fill(torch.tensor(list(tokens)), [table] * len(tokens), places)

    @inference
    def _run_lane(self, size: int) -> None:
        self._forward.run(self._tokens[size], None, 0, self.num_layers, regimes=self.regimes, checks=self._checks)

    def left_at(self, depth: int) -> Tensor:
        """The states at depth L, or one of the `captured_depths`, that the last pass has left [256, D]."""
        return self._leaving if depth == self.num_layers else self._captured[depth]

    def choose_rows(self, rows: Tensor, drawing: Tensor | None = None) -> Tensor:
        """The tokens chosen at `rows` [N] of the last pass [N]: those of the largest logits, or with `drawing` [3, N]
        as `drawn_or_largest` has them."""
        return self._head.choose(self._leaving.index_select(0, rows), drawing)

    def _run_in_buckets(
        self,
        ids: Tensor,
        caches: Sequence[PagedCache],
        places: TokenPlaces,
        first: int,
        last: int,
        entering: Tensor | None,
        captured: CapturedStates | None = None,
    ) -> Tensor:
        """ids [T] and `entering` [T, D] -> the state at depth `last` [T, D].
        `caches`: each token's; empty if no layer runs.

        More tokens than the largest bucket holds run in several passes. The result is that of one pass, because a token
        sees those before it through its cache.
        """
        pieces = []
        captures: dict[int, list[Tensor]] = {
            depth: [] for depth in self._captured if captured is not None and first < depth < last
        }
        for start in range(0, len(places.positions), BUCKETS[-1]):
            piece = slice(start, start + BUCKETS[-1])
            piece_places = places.cut(piece)
            count = len(piece_places.positions)
            bucket = bucket_of(count, BUCKETS)
            replay = self._recorded_layers(first, last, bucket)
            indices = [self.pool.table_index(cache) for cache in caches[piece]] or [0] * count
            self._tokens[bucket].fill(ids[piece], indices, piece_places)
            assert (entering is None) == (first == 0)
            if entering is not None:
                self._entering[:count].copy_(entering[piece])
            replay()
            self.counters.add(first, last, count)
            pieces.append(self._leaving[:count].clone())
            for depth, states in captures.items():
                states.append(self._captured[depth][:count].clone())
        if captured is not None:
            captured.update({depth: joined(states)[None] for depth, states in captures.items()})
        return joined(pieces)

    def _recorded_layers(self, first: int, last: int, bucket: int) -> Work:
        """The pass through layers [first, last) over one bucket. Records it at the first call."""
        replay = self._layer_passes.get((first, last, bucket))
        if replay is None:
            self._tokens[bucket].clear()  # so that recording writes to no sequence's blocks
            work = partial(self._run_layers, first, last, bucket)
            replay = self._layer_passes[first, last, bucket] = self._recorder.record(work)
        return replay

    @inference
    def _run_layers(self, first: int, last: int, bucket: int) -> None:
        entering = self._entering[:bucket] if first else None
        captured: CapturedStates = {}
        self._model.prepare_capture(first, last, captured)
        state = self._forward.run(
            self._tokens[bucket], entering, first, last, regimes=self.regimes, captured=captured, checks=self._checks
        )
        self._leaving[:bucket].copy_(state)
        for depth, states in captured.items():
            self._captured[depth][:bucket].copy_(states[0])

    def _set_up(self, transform: LayerTransform | None, *, checks: bool = False) -> None:
        """Makes later passes run with `transform`, and drops all recorded passes.
        `checks` is as in `PagedForward.run`."""
        self._forward = PagedForward(self.loaded, self._model.gates, self.pool, transform)
        self._checks = checks
        self._layer_passes: dict[tuple[int, int, int], Work] = {}
        self._head.set_up(self._recorder)
        self._lane: dict[int, Work] = {}

    def _why_not(self, check: StateCheck, transform: LayerTransform | None, what: str) -> str:
        """Sets passes up with `transform` and the current recorder.
        Returns why they do not give the right states, empty if they do."""
        try:
            self._set_up(transform)
            check.compare(self.run_ragged, self.new_cache, what)
        except UnsupportedModel as error:
            logger.warning("%s is served without %s: %s", self.loaded.model_id, what, error.message)
            return error.message
        return ""

    def _waits_for_device(self) -> str:
        """Which operations of a pass wait for the device, as a sentence; empty if none does."""
        self._set_up(None)
        self._tokens[BUCKETS[0]].clear()
        syncs = host_syncs(partial(self._run_layers, 0, self.num_layers, BUCKETS[0]))
        for work in self._head.smallest():
            syncs += host_syncs(work)
        if not syncs:
            return ""
        why = f"they wait for the device: {', '.join(sorted(set(syncs)))}"
        logger.warning("passes of %s are not recorded, and are slower, because %s", self.loaded.model_id, why)
        return why

    def _layer_shapes(self) -> list[LayerShape]:
        """The form of the keys and values that the model's own attention puts into a cache, layer by layer, but for
        layers that read those of others."""
        cache, shapes = self._model.one_token_cache, []
        for index in range(self.num_layers):
            if index in self._model.gates.kv_layers:
                continue
            if index not in cache.keys:
                raise UnsupportedModel(
                    f"layer {index} of {self.loaded.architecture} keeps no keys and values of its own",
                    reason="PAGES_NOT_SUPPORTED",
                )
            keys, values = cache.keys[index], cache.values[index]
            shapes.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype))
        return shapes

    @inference
    def _make_buffers(self) -> None:
        """Allocates the tensors that recorded passes read and write."""
        device, dtype = self.loaded.device, self.loaded.model.dtype
        width = self.loaded.hidden_size
        self.lane_sizes = tuple(size for size in LANE_SIZES if size <= self.loaded.context_length)
        self._tokens = {size: TokenBuffer(size, device) for size in (*BUCKETS, *self.lane_sizes)}
        self._entering = torch.zeros(BUCKETS[-1], width, dtype=dtype, device=device)
        self._leaving = torch.zeros_like(self._entering)
        # Every pass captures its states, wanted or not: two small copies cost less than recording each pass twice.
        self._captured = {depth: torch.zeros_like(self._entering) for depth in captured_depths(self.num_layers)}
