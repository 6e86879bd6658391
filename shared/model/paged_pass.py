"""One pass over T tokens of any sequences through the model's own forward, with nothing in it that a later pass would change.

Tokens, positions and rows come from tensors that stay where they are, the state too: so the pass can be recorded once and replayed
over other numbers. A token at a negative position is padding: it computes something, writes nothing and is read by nobody.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shared.model.cache import LengthlessCache
from shared.model.gates import Forward, Gates, LayerOutput
from shared.model.load import LoadedModel
from shared.model.paged_kv import PagePool
from shared.model.substitution import paged_attention
from shared.model.substitution.paged_attention import LayerPages, PagedMask, PagedOffset

# Given a layer's index and its own forward, what to run in its place: see `shared.model.substitution.compiled`.
LayerTransform = Callable[[int, Forward], Forward]


class TokenBuffer:
    """Tokens of passes to come, `num_tokens` each time, in a place that stays.

    `ids`, their `positions` (negative: padding) and their `rows` of the page table, each [T] int64: views of `packed` [3, T].
    """

    @torch.inference_mode()
    def __init__(self, num_tokens: int, device: torch.device) -> None:
        self.num_tokens = num_tokens
        self.packed = torch.zeros(3, num_tokens, dtype=torch.int64, device=device)
        self.ids, self.positions, self.rows = self.packed.unbind()
        self.clear()

    @torch.inference_mode()
    def clear(self) -> None:
        """All padding."""
        self.positions.fill_(-1)

    @torch.inference_mode()
    def fill(self, ids: Tensor, positions: list[int], rows: list[int]) -> None:
        """The tokens `ids` [N <= T] at their positions and rows; the rest is padding. One copy, where `ids` are on the host."""
        padding = self.num_tokens - len(positions)
        host = torch.tensor(
            [[0] * self.num_tokens, positions + [-1] * padding, rows + [0] * padding]
        )
        on_host = ids.device.type == "cpu"
        if on_host:
            host[0, : len(ids)] = ids
        # Pageable memory: the driver takes it over before it returns, and waits for no pass under way.
        self.packed.copy_(host, non_blocking=True)
        if not on_host:
            self.ids[: len(ids)].copy_(ids)


class _LayerCache(LengthlessCache):
    """A pass' cache as one layer sees it. Keys and values stay what they are: attention writes them, knowing the layer."""

    def __init__(self, num_tokens: int, checks: bool) -> None:
        super().__init__()
        self._num_tokens = num_tokens
        self._offset = PagedOffset(checks)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._offset

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return self._num_tokens, 0


class PagedForward:
    """Passes of one model over one pool. One thread. `transform` changes what runs in place of each layer's own forward."""

    def __init__(
        self,
        loaded: LoadedModel,
        gates: Gates,
        pool: PagePool,
        transform: LayerTransform | None = None,
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
        self._layers = tuple(
            self._with_pages(index, forward) for index, forward in enumerate(forwards)
        )
        self._tokens: TokenBuffer | None = None

    @torch.inference_mode()
    def run(
        self,
        tokens: TokenBuffer,
        entering: Tensor | None,
        first: int,
        last: int,
        *,
        checks: bool = False,
    ) -> Tensor:
        """Layers [first, last) over T tokens; `entering` [T, D] is their state at depth `first` (None only for depth 0).

        Returns their state at depth `last` [T, D]. With `checks`, masks are proved: see `PagedOffset`. Counts nothing.
        """
        counters = self._gates.counters
        counted = list(counters.per_layer), counters.token_layers
        self._tokens = tokens
        try:
            with self._attention():
                state = self._gates.run(
                    first,
                    last,
                    None if entering is None else entering[None],
                    forwards=self._layers,
                    input_ids=tokens.ids[None],
                    # Padding has to have some position that the model knows.
                    position_ids=tokens.positions.clamp(min=0)[None],
                    past_key_values=_LayerCache(tokens.num_tokens, checks),
                    use_cache=True,
                )
            return state[0]
        finally:
            self._tokens = None
            counters.per_layer, counters.token_layers = counted

    def _with_pages(self, index: int, forward: Forward) -> Forward:
        keys, values, pages = self._pool.keys[index], self._pool.values[index], self._pool.pages

        def paged(*args: Any, **kwargs: Any) -> LayerOutput:
            tokens = self._tokens
            assert tokens is not None
            layer = LayerPages(keys, values, pages, tokens.rows, tokens.positions)

            def located(value: Any) -> Any:
                return value.at(layer) if isinstance(value, PagedMask) else value

            named = {name: located(value) for name, value in kwargs.items()}
            return forward(*map(located, args), **named)

        return paged

    @contextmanager
    def _attention(self) -> Iterator[None]:
        """Our attention under the model, for this pass alone: other users of the model keep its own."""
        held = [config._attn_implementation for config in self._configs]
        for config in self._configs:
            config._attn_implementation = paged_attention.NAME
        try:
            yield
        finally:
            for config, name in zip(self._configs, held, strict=True):
                config._attn_implementation = name
