"""The executor: parts of the model, run on demand, with what ran counted."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shared.model.cache import SlotCache
from shared.model.gates import Gates, LayerCounters
from shared.model.load import LoadedModel
from shared.model.packed import PackedCache, Segment
from shared.ops import hf_attention

# Relative difference up to which norm + head called directly count as the model's own way from state to logits.
HEAD_TOLERANCE = 1e-4
# The same for states of several sequences in one pass.
PACKING_TOLERANCE = 1e-4


class DepthRunner:
    """Runs layers [first, last) of one model. Not thread-safe: one thread owns it, and there is one per model."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.num_layers = loaded.num_layers
        self._gates = _gates_of(loaded)
        self._head_is_direct = self._check_direct_head()
        self._embedding_is_direct = False
        self._embedding_is_direct = self._check_direct_embedding()
        # Several sequences in one pass; where a family does not allow it, they go one by one.
        self.can_pack = self._check_packing()
        self._one_slot = self._run_one_slot()
        self.counters.reset()

    @property
    def counters(self) -> LayerCounters:
        return self._gates.counters

    @property
    def page_slots(self) -> int:
        """Positions by which a cache's memory grows."""
        return 1

    def usable_bytes(self, wanted: int) -> int:
        """Of `wanted` bytes for all caches, what they can really have."""
        return wanted

    def prepare(self, depths: Sequence[int]) -> Iterator[None]:
        """Whatever makes later passes between `depths` as fast as they can be; yields where other work may come between."""
        return iter(())

    def ids(self, tokens: Sequence[int]) -> Tensor:
        """[1, T] of one pass, where it wants them."""
        return torch.tensor([list(tokens)], device=self.loaded.device)

    def new_cache(self, capacity: int) -> SlotCache:
        return SlotCache(capacity)

    def reserve(self, cache: SlotCache) -> None:
        """Allocates all memory of a new cache for one sequence now; otherwise each layer's first pass does, which others may share.

        Raises `Exhausted` (reason OUT_OF_MEMORY).
        """
        cache.reserve(self._one_slot)

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
        """Layers [first, last) over tokens [B, Q] at positions [base, base + Q).

        `hidden` [B, Q, D] is their state at depth `first` (None only for depth 0). Returns their state at depth `last`.
        The token ids are always needed: some families derive positions or masks from them.
        """
        assert (hidden is None) == (first == 0)
        assert 0 <= first < last <= self.num_layers
        cache.begin(base, token_ids.shape[1])
        return self._gates.run(
            first, last, hidden, input_ids=token_ids, past_key_values=cache, use_cache=True
        )

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
        """Layers [first, last) over tokens [1, T] of several sequences, segment after segment; only where `can_pack`.

        `hidden` [1, T, D] is their state at depth `first` (None only for depth 0). Returns their state at depth `last`.
        """
        assert (hidden is None) == (first == 0)
        assert 0 <= first < last <= self.num_layers
        positions = torch.cat([torch.arange(s.base, s.base + s.num_tokens) for s in segments])
        return self._gates.run(
            first,
            last,
            hidden,
            input_ids=token_ids,
            position_ids=positions[None].to(token_ids.device),
            past_key_values=PackedCache(segments),
            use_cache=True,
        )

    def _run_one_slot(self) -> dict[int, tuple[Tensor, Tensor]]:
        """The model's own keys and values of one token [1, Hkv, 1, Dh] by layer: what a layer puts into a cache."""
        cache = SlotCache(1)
        token = torch.zeros(1, 1, dtype=torch.long, device=self.loaded.device)
        DepthRunner.run(self, token, cache, first=0, last=self.num_layers, base=0)
        return {index: (keys, cache.values[index]) for index, keys in cache.keys.items()}

    @torch.inference_mode()
    def _check_packing(self) -> bool:
        """Whether three sequences in one pass get the states that they get alone, for a window's length and more."""
        if self.loaded.model.config._attn_implementation != hf_attention.NAME:
            return False
        generator = torch.Generator().manual_seed(0)
        window = getattr(self.loaded.model.config, "sliding_window", None) or 0
        longest = min(max(24, min(window, 512) + 8), self.loaded.context_length)
        alone, fresh, tokens = [], [], []
        for length in (longest, 3, longest // 2):
            ids = torch.randint(self.loaded.vocabulary_size, (1, length), generator=generator)
            caches = self.new_cache(length), self.new_cache(length)
            held = length // 2
            for cache in caches:
                if held:
                    self.run(ids[:, :held], cache, first=0, last=self.num_layers, base=0)
            alone.append(
                self.run(ids[:, held:], caches[0], first=0, last=self.num_layers, base=held)
            )
            fresh.append(Segment(caches[1], held, length - held))
            tokens.append(ids[:, held:])
        expected = torch.cat(alone, 1)
        try:
            together = self.run_packed(torch.cat(tokens, 1), fresh, first=0, last=self.num_layers)
        except (AttributeError, TypeError, RuntimeError, NotImplementedError):
            return False  # the family looks inside what ours only hand through
        scale = expected.abs().max().clamp_min(1e-9)
        return bool((together - expected).abs().max() <= PACKING_TOLERANCE * scale)

    @torch.inference_mode()
    def embed(self, token_ids: Tensor, base: int = 0) -> Tensor:
        """The state at depth 0 [B, Q, D] of tokens [B, Q] at positions [base, base + Q); runs no layer."""
        if self._embedding_is_direct:
            rows: Tensor = self.loaded.parts.embedding(token_ids)
            return rows
        cache = self.new_cache(base + token_ids.shape[1])
        cache.begin(base, token_ids.shape[1])
        return self._gates.run(
            0, 0, None, input_ids=token_ids, past_key_values=cache, use_cache=True
        )

    def embed_tokens(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """The states at depth 0 [N, D] of tokens of several sequences, each at its position; runs no layer."""
        if self._embedding_is_direct:
            return self.embed(self.ids(tokens))[0]
        alone = [
            self.embed(self.ids([token]), position)[0]
            for token, position in zip(tokens, positions, strict=True)
        ]
        return torch.cat(alone)

    @torch.inference_mode()
    def normed(self, state: Tensor) -> Tensor:
        """The final norm of states [..., D]; the state itself where the model has none."""
        norm = self.loaded.parts.final_norm
        return state if norm is None else norm(state)

    @torch.inference_mode()
    def logits(self, state: Tensor) -> Tensor:
        """State at depth L [..., D] -> float32 logits [..., V]."""
        if self._head_is_direct:
            logits: Tensor = self.loaded.parts.head(self.normed(state))
            return logits.float()
        flat = state.reshape(1, -1, state.shape[-1])
        return self._own_head(flat).reshape(*state.shape[:-1], -1)

    @torch.inference_mode()
    def capture(
        self, token_ids: Tensor, depths: Sequence[int], *, attention_mask: Tensor | None = None
    ) -> dict[int, Tensor]:
        """One full pass over [B, Q] without a cache: the states at `depths` (L allowed), each [B, Q, D]."""
        return self._gates.capture(
            depths, input_ids=token_ids, attention_mask=attention_mask, use_cache=False
        )

    def _own_head(self, state: Tensor) -> Tensor:
        tokens = torch.ones(state.shape[:2], dtype=torch.long, device=state.device)
        return self._gates.head(state, input_ids=tokens, use_cache=False).float()

    @torch.inference_mode()
    def _check_direct_head(self) -> bool:
        """Whether final norm + head is all the model does after its layers (no scaling, capping or projection)."""
        generator = torch.Generator().manual_seed(0)
        state = torch.randn(1, 3, self.loaded.hidden_size, generator=generator)
        state = 10 * state.to(self.loaded.device, self.loaded.model.dtype)
        own = self._own_head(state)
        try:
            direct = self.loaded.parts.head(self.normed(state)).float()
        except RuntimeError:  # a projection stands between them, as in some OPT models
            return False
        scale = own.abs().max().clamp_min(1e-9)
        return direct.shape == own.shape and bool(
            (direct - own).abs().max() <= HEAD_TOLERANCE * scale
        )

    @torch.inference_mode()
    def _check_direct_embedding(self) -> bool:
        """Whether what enters layer 0 is the embedding's rows: no positions, norm, scale or projection between."""
        count = min(8, self.loaded.vocabulary_size, self.loaded.context_length - 1)
        tokens = torch.arange(count, device=self.loaded.device)[None]
        rows = self.loaded.parts.embedding(tokens)
        entering = self.embed(tokens, base=1)
        return rows.shape == entering.shape and torch.equal(rows, entering)


def _gates_of(loaded: LoadedModel) -> Gates:
    """The model's gates; a model is patched once, however many runners are made for it."""
    gates = getattr(loaded.model, "_neap_gates", None)
    if gates is None:
        gates = Gates(loaded.model, loaded.parts.layers)
        object.__setattr__(loaded.model, "_neap_gates", gates)
    assert isinstance(gates, Gates)
    return gates
