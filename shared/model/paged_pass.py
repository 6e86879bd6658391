"""One pass over T tokens of any sequences through the model's own forward, in a form that can be recorded.

Tokens, positions, block tables and states are read from tensors that stay in place, and nothing on the host depends on
them. So the pass is recorded once and replayed over other numbers. A token at a negative position is padding: something
is computed for it, but nothing is written, and nobody reads the result.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shared.model.cache import LengthlessCache
from shared.model.gates import Forward, Gates, LayerOutput
from shared.model.inference import inference
from shared.model.loaded import LoadedModel
from shared.model.paged_kv import BLOCK_TOKENS, BlockPool
from shared.model.regimes import Regimes
from shared.model.substitution import paged_attention
from shared.model.substitution.paged_attention import LayerBlocks, PagedMask, PagedOffset

# Takes a layer's index and its own forward. Returns what runs in its place: see `shared.model.runners`.
LayerTransform = Callable[[int, Forward], Forward]


@dataclass
class TokenPlaces:
    """Where the tokens of a pass stand: their positions, those that the model sees (other ones in checks only: see
    `KVCache.origin`), and their regimes."""

    positions: list[int] = field(default_factory=list)
    seen_at: list[int] = field(default_factory=list)
    regimes: list[int] = field(default_factory=list)

    @classmethod
    def without_layers(cls, positions: Sequence[int]) -> "TokenPlaces":
        """Those of tokens that no layer runs over."""
        places = list(positions)
        return cls(places, places, [0] * len(places))

    def cut(self, part: slice) -> "TokenPlaces":
        return TokenPlaces(self.positions[part], self.seen_at[part], self.regimes[part])


class TokenBuffer:
    """The tokens of a pass, in tensors that stay in place. Every pass has T = `num_tokens` tokens.

    `ids`, `table_indices`, the index of each token's block table, and what `TokenPlaces` has (a negative position:
    padding): each [T] int64, views of `stacked` [5, T].
    """

    @inference
    def __init__(self, num_tokens: int, device: torch.device) -> None:
        self.num_tokens = num_tokens
        self.stacked = torch.zeros(5, num_tokens, dtype=torch.int64, device=device)
        self.ids, self.table_indices, self.positions, self.seen_at, self.regimes = self.stacked.unbind()
        self.clear()

    @inference
    def clear(self) -> None:
        """Makes all tokens padding."""
        self.positions.fill_(-1)

    @inference
    def fill(self, ids: Tensor, table_indices: list[int], places: TokenPlaces) -> None:
        """Sets N <= T tokens: `ids` [N], the indices of their block tables, and their places. The rest is padding. One
        copy if `ids` are on the host."""
        padding = [0] * (self.num_tokens - len(table_indices))
        host = torch.tensor(
            [
                [0] * self.num_tokens,
                table_indices + padding,
                places.positions + [-1] * len(padding),
                places.seen_at + padding,
                places.regimes + padding,
            ]
        )
        on_host = ids.device.type == "cpu"
        if on_host:
            host[0, : len(ids)] = ids
        # From pageable memory: the driver copies it before the call returns, and does not wait for a running pass.
        self.stacked.copy_(host, non_blocking=True)
        if not on_host:
            self.ids[: len(ids)].copy_(ids)


class _LayerCache(LengthlessCache):
    """The transformers cache of a paged pass. It returns keys and values unchanged, because attention writes them to
    the pool. `seen`: returns what a layer's attention has written in another pass over the same tokens."""

    def __init__(self, offset: int, seen: Callable[[int], tuple[Tensor, Tensor]]) -> None:
        super().__init__(offset)
        self.seen = seen

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


class PagedForward:
    """Runs passes of one model over one block pool, on one thread. `transform` replaces each layer's own forward."""

    def __init__(
        self, loaded: LoadedModel, gates: Gates, pool: BlockPool, transform: LayerTransform | None = None
    ) -> None:
        paged_attention.register()
        self._gates = gates
        self._pool = pool
        modules = loaded.model.modules()
        configs: dict[int, Any] = {id(m.config): m.config for m in modules if hasattr(m, "config")}
        self._configs = list(configs.values())
        forwards = gates.forwards
        if transform is not None:
            forwards = tuple(transform(index, forward) for index, forward in enumerate(forwards))
        self._layers = tuple(self._with_blocks(index, forward) for index, forward in enumerate(forwards))
        self._tokens: TokenBuffer | None = None

    @inference
    def run(
        self,
        tokens: TokenBuffer,
        entering: Tensor | None,
        first: int,
        last: int,
        *,
        regimes: Regimes,
        captured: dict[int, Tensor] | None = None,
        checks: bool = False,
    ) -> Tensor:
        """Runs layers [first, last) over T tokens.
        `entering` [T, D]: their state at depth `first`, or None for depth 0.

        Returns their state at depth `last` [T, D]. `captured` as in `Gates.run`, with B = 1. With `checks`, masks are
        verified: see `PagedOffset`. Leaves the counters unchanged.
        """
        counted = self._gates.counters.copy()
        self._tokens = tokens
        try:
            with self._attention(), regimes.during(tokens.regimes[None] if regimes.are_several else None):
                state = self._gates.run(
                    first,
                    last,
                    None if entering is None else entering[None],
                    forwards=self._layers,
                    captured=captured,
                    input_ids=tokens.ids[None],
                    position_ids=tokens.seen_at[None],
                    cache=_LayerCache(PagedOffset(checks), self._seen),
                    use_cache=True,
                )
            return state[0]
        finally:
            self._tokens = None
            self._gates.counters = counted

    def _stores(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys and values that a layer attends to."""
        shared = self._gates.kv_layers
        place = sum(earlier not in shared for earlier in range(shared.get(layer, layer)))
        return self._pool.keys[place], self._pool.values[place]

    def _seen(self, layer: int) -> tuple[Tensor, Tensor]:
        tokens = self._tokens
        assert tokens is not None
        positions = tokens.positions.clamp_min(0)
        blocks = self._pool.block_tables[tokens.table_indices, positions // BLOCK_TOKENS]
        keys, values = (
            store[blocks, :, positions % BLOCK_TOKENS].transpose(0, 1)[None] for store in self._stores(layer)
        )
        return keys, values

    def _with_blocks(self, index: int, forward: Forward) -> Forward:
        keys, values = self._stores(index)
        block_tables = self._pool.block_tables

        def paged(*args: Any, **kwargs: Any) -> LayerOutput:
            tokens = self._tokens
            assert tokens is not None
            layer = LayerBlocks(keys, values, block_tables, tokens.table_indices, tokens.positions)

            def located(value: Any) -> Any:
                return value.for_layer(layer) if isinstance(value, PagedMask) else value

            named = {name: located(value) for name, value in kwargs.items()}
            return forward(*map(located, args), **named)

        return paged

    @contextmanager
    def _attention(self) -> Iterator[None]:
        """Switches the model to our attention for this pass only. Other users of the model keep its own attention."""
        held = [config._attn_implementation for config in self._configs]
        for config in self._configs:
            config._attn_implementation = paged_attention.NAME
        try:
            yield
        finally:
            for config, name in zip(self._configs, held, strict=True):
                config._attn_implementation = name
