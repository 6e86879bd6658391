"""The runner over contiguous KV caches: direct passes where they give the same bits, else the model's own forward, on
any device."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from shared.model.borders import NUM_CHECKED, crossing_length, origins
from shared.model.cache import KVCache, as_contiguous, refuse_if_out_of_memory
from shared.model.gated_model import GatedModel
from shared.model.inference import inference
from shared.model.loaded import LoadedModel
from shared.model.model_checks import check_cuts
from shared.model.ragged import RaggedCache, RaggedSequence
from shared.model.recorder import Work
from shared.model.runner import CapturedStates
from shared.model.substitution import attention

# Largest relative difference between the states of a sequence alone and in a ragged batch.
RAGGED_TOLERANCE = 1e-4
_CANNOT = (AttributeError, LookupError, TypeError, ValueError, RuntimeError)
# Windows up to this number of tokens are tried with as many tokens. Of a longer one only the mask is checked.
LONGEST_BORDER = 512


class ContiguousRunner(GatedModel):
    """A `Runner` whose caches are `ContiguousCache`s. `run`, `embed` and `capture` also take B rows [B, Q] at once.

    `why`: why the model is not run over paged KV, if somebody asks for recorded passes or compiled layers.
    """

    records = False
    compiles = False
    block_tokens = 1
    pass_sizes = ()

    def __init__(self, loaded: LoadedModel, why: str = "") -> None:
        super().__init__(loaded)
        self.why_not_recorded = self.why_not_compiled = why
        self._device = loaded.device
        # A large model takes seconds for these, and a calibration makes several runners.
        length, recall = loaded.context_length, loaded.facts.recall
        recall(f"cuts do not matter, {length}", lambda: check_cuts(self))
        self.supports_ragged = recall(f"rows may share a pass, {length}", self._check_ragged)
        self.counters.reset()

    @property
    def description(self) -> str:
        if self.direct is None:
            return f"by the model's own forward: {self.why_not_direct}"
        return "as the embedding and one op for all layers"

    def usable_bytes(self, num_bytes: int) -> int:
        return num_bytes

    def prepare(self, depths: Sequence[int]) -> Iterator[None]:
        """There is nothing to prepare."""
        return iter(())

    def record(self, work: Work) -> Work:
        return work

    def ids(self, tokens: Sequence[int]) -> Tensor:
        # Through NumPy: `torch.tensor` takes three times as long, and lets other threads take the GIL.
        return torch.from_numpy(np.array([tokens], dtype=np.int64)).to(self._device)

    def reserve(self, cache: KVCache) -> None:
        as_contiguous(cache).reserve(self.one_token_cache)

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
        if captured is not None:
            self.prepare_capture(first, last, captured)
        cache = RaggedCache(sequences)
        if self.direct is not None:
            out = self.direct.run(first, last, hidden, token_ids, cache, cache.spans, captured)
            if out is not None:
                return out
        positions = torch.cat([torch.arange(span.start, span.end) for span in cache.spans])
        with self.regimes_of(sequences):
            return self.gates.run(
                first,
                last,
                hidden,
                captured=captured,
                input_ids=token_ids,
                position_ids=positions[None].to(token_ids.device),
                cache=cache,
                use_cache=True,
            )

    def embed_tokens(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        if self.embedding_is_direct:
            return self.embed(self.ids(tokens))[0]
        alone = [self.embed(self.ids([token]), position)[0] for token, position in zip(tokens, positions, strict=True)]
        return torch.cat(alone)

    @inference
    def _check_ragged(self) -> bool:
        """Whether sequences get the same states in a ragged batch, after a rollback, as alone. One of them is longer
        than the model's window, and others cross each border."""
        if self.loaded.model.config._attn_implementation != attention.NAME:
            return False
        generator = torch.Generator().manual_seed(0)
        config, context_length = self.loaded.model.config, self.loaded.context_length
        longest = crossing_length(config, context_length, LONGEST_BORDER)
        late = [(NUM_CHECKED, place) for place in origins(config, context_length) if place]
        alone, sequences, tokens = [], [], []
        for length, place in ((longest, 0), (min(3, longest), 0), (longest // 2, 0), *late):
            ids = torch.randint(self.loaded.vocabulary_size, (1, length), generator=generator)
            caches = self.new_cache(length), self.new_cache(length)
            held, read = length // 2, place + length
            try:
                for cache in caches:
                    cache.origin = place
                    if held:
                        self._run_all(ids[:, :held], cache, 0, read)
                alone.append(self._run_all(ids[:, held:], caches[0], held, read))
            except _CANNOT as error:
                refuse_if_out_of_memory(error)
                return False  # it cannot begin late, so it cannot be checked
            sequences.append(RaggedSequence(caches[1], held, length - held, read))
            tokens.append(ids[:, held:])
        expected, asked, last = torch.cat(alone, 1), torch.cat(tokens, 1), self.num_layers
        try:
            self.run_ragged(asked.flip(1), sequences, first=0, last=last)
            together = self.run_ragged(asked, sequences, first=0, last=last)
        except _CANNOT as error:
            refuse_if_out_of_memory(error)
            return False  # the family's own code looks inside the objects of `substitution.ragged`
        scale = expected.abs().max().clamp_min(1e-9)
        return bool((together - expected).abs().max() <= RAGGED_TOLERANCE * scale)

    def _run_all(self, ids: Tensor, cache: KVCache, base: int, read_length: int) -> Tensor:
        last = self.num_layers
        return self.run(ids, cache, first=0, last=last, base=base, read_length=read_length)
