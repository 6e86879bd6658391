"""The runner over contiguous KV caches: direct passes where they give the same bits, else the model's own forward, on any device."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shared.model.cache import KVCache, as_contiguous
from shared.model.gated_model import GatedModel
from shared.model.loaded import LoadedModel
from shared.model.ragged import RaggedCache, RaggedSequence
from shared.model.recorder import Work
from shared.model.runner import Taps
from shared.model.substitution import attention

# Largest relative difference between the states of a sequence alone and in a ragged batch.
RAGGED_TOLERANCE = 1e-4


class ContiguousRunner(GatedModel):
    """A `Runner` whose caches are `ContiguousCache`s. `run`, `embed` and `capture` also take B rows [B, Q] at once.

    `why`: why the model is not run over paged KV, if somebody asks for recorded passes or compiled layers.
    """

    records = False
    compiles = False
    block_tokens = 1
    supports_leaves = False

    def __init__(self, loaded: LoadedModel, why: str = "") -> None:
        super().__init__(loaded)
        self.why_not_recorded = self.why_not_compiled = why
        self.supports_ragged = self._check_ragged()
        self.counters.reset()

    @property
    def description(self) -> str:
        if self.direct is None:
            return f"by the model's own forward: {self.why_not_direct}"
        return "as the embedding and one op for all layers"

    def usable_bytes(self, wanted: int) -> int:
        return wanted

    def prepare(self, depths: Sequence[int]) -> Iterator[None]:
        """There is nothing to prepare."""
        return iter(())

    def record(self, work: Work) -> Work:
        return work

    def ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], device=self.loaded.device)

    def reserve(self, cache: KVCache) -> None:
        as_contiguous(cache).reserve(self.one_token_cache)

    @torch.inference_mode()
    def run_ragged(
        self,
        token_ids: Tensor,
        sequences: Sequence[RaggedSequence],
        *,
        first: int,
        last: int,
        hidden: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        taps = self.tapped(first, last, taps)
        cache = RaggedCache(sequences)
        if self.direct is not None:
            out = self.direct.run(first, last, hidden, token_ids, cache, cache.spans, taps)
            if out is not None:
                return out
        positions = torch.cat([torch.arange(s.base, s.base + s.num_tokens) for s in sequences])
        return self.gates.run(
            first,
            last,
            hidden,
            taps=taps,
            input_ids=token_ids,
            position_ids=positions[None].to(token_ids.device),
            past_key_values=cache,
            use_cache=True,
        )

    def move(self, moves: Sequence[tuple[KVCache, int, int]]) -> None:
        raise NotImplementedError("contiguous caches hold no leaves")

    def embed_tokens(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        if self.embedding_is_direct:
            return self.embed(self.ids(tokens))[0]
        alone = [
            self.embed(self.ids([token]), position)[0]
            for token, position in zip(tokens, positions, strict=True)
        ]
        return torch.cat(alone)

    @torch.inference_mode()
    def _check_ragged(self) -> bool:
        """Whether three sequences get the same states in a ragged batch as alone, one of them longer than the model's window."""
        if self.loaded.model.config._attn_implementation != attention.NAME:
            return False
        generator = torch.Generator().manual_seed(0)
        window = getattr(self.loaded.model.config, "sliding_window", None) or 0
        longest = min(max(24, min(window, 512) + 8), self.loaded.context_length)
        alone, sequences, tokens = [], [], []
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
            sequences.append(RaggedSequence(caches[1], held, length - held))
            tokens.append(ids[:, held:])
        expected = torch.cat(alone, 1)
        try:
            together = self.run_ragged(
                torch.cat(tokens, 1), sequences, first=0, last=self.num_layers
            )
        except (AttributeError, TypeError, RuntimeError, NotImplementedError):
            return False  # the family's own code looks inside the objects of `substitution.ragged`
        scale = expected.abs().max().clamp_min(1e-9)
        return bool((together - expected).abs().max() <= RAGGED_TOLERANCE * scale)
