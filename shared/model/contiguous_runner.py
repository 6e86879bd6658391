"""A model's own forward, run in parts over contiguous KV caches, and the runner that does so: by direct passes where
they give the same bits, on any device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from shared import ops
from shared.model.borders import NUM_CHECKED, crossing_length, origins
from shared.model.cache import ContiguousCache, KVCache, as_contiguous, refuse_if_out_of_memory
from shared.model.choosing import largest
from shared.model.direct_pass import DirectPass
from shared.model.gates import Gates, LayerCounters
from shared.model.inference import inference
from shared.model.layer_kinds import layer_kinds
from shared.model.loaded import LoadedModel
from shared.model.model_checks import check_cuts
from shared.model.ragged import RaggedCache, RaggedSequence
from shared.model.recorder import Work
from shared.model.regimes import Regimes, find_regimes
from shared.model.runner import CapturedStates, captured_depths
from shared.model.substitution import attention
from shared.model.substitution.match import Unsuitable
from shared.model.substitution.ragged import Span

T = TypeVar("T")

# Largest relative difference at which final norm + head, called directly, count as what the model itself computes from
# a state.
HEAD_TOLERANCE = 1e-4
_NOTHING = torch.empty(0)
# Largest relative difference between the states of a sequence alone and in a ragged batch.
RAGGED_TOLERANCE = 1e-4
_CANNOT = (AttributeError, LookupError, TypeError, ValueError, RuntimeError)
# Windows up to this number of tokens are tried with as many tokens. For a longer one only the mask is checked.
LONGEST_BORDER = 512


class GatedModel:
    """The gates of a model, and whether its embedding and its head may be called directly. Not thread-safe."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.num_layers = loaded.num_layers
        kinds = layer_kinds(loaded.model)
        assert kinds is not None, "a model is loaded if its layers are found"
        self._kinds, self.tried_depth = kinds, kinds.depth
        self._captured_depths = captured_depths(loaded.num_layers)
        self.gates = _gates_of(loaded)
        self.regimes = _regimes_of(loaded)
        self.head_is_direct = self._recall("head is direct", self._check_direct_head)
        # Whether a state at depth 0 is the token's row of the embedding and nothing else.
        self.embedding_is_direct = False
        self.embedding_is_direct = self._recall("embedding is direct", self._check_direct_embedding)
        # Runs passes without the model's own forward, or None if `why_not_direct`.
        self.direct: DirectPass | None = None
        self.direct, self.why_not_direct = self._check_direct_pass()
        # The model's own keys and values of one token. They show what each layer puts into a cache.
        self.one_token_cache = self._run_one_token()
        self.counters.reset()

    def _recall(self, name: str, find_out: Callable[[], T]) -> T:
        """What an earlier start knows of the model with this context length, or else what `find_out` returns."""
        name = f"{name}, {self.loaded.context_length}"
        return self.loaded.facts.recall(name, find_out, again=True)

    @property
    def counters(self) -> LayerCounters:
        return self.gates.counters

    def new_cache(self, capacity: int) -> ContiguousCache:
        """A contiguous cache that holds keys and values in the dtype of the loaded model."""
        return ContiguousCache(capacity, self.loaded.kv_dtype)

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
        """As `Runner.run`, over a contiguous cache and for B rows of tokens: token_ids [B, Q], hidden [B, Q, D] -> [B,
        Q, D]."""
        contiguous = as_contiguous(cache)
        contiguous.begin(base, token_ids.shape[1])
        if captured is not None:
            self.prepare_capture(first, last, captured)
        if self.direct is not None and last:
            start = contiguous.origin + base
            span = Span(start, start + token_ids.shape[1], contiguous.origin)
            out = self.direct.run(first, last, hidden, token_ids, contiguous, [span], captured)
            if out is not None:
                return out
        sequence = RaggedSequence(contiguous, base, token_ids.shape[1], read_length=read_length)
        with self.regimes_of([sequence]):
            return self.gates.run(
                first, last, hidden, captured=captured, input_ids=token_ids, cache=contiguous, use_cache=True
            )

    def regimes_of(self, sequences: Sequence[RaggedSequence]) -> AbstractContextManager[None]:
        """Within it, the tokens of a pass get the angles of their regimes."""
        if not self.regimes.are_several:
            return nullcontext()
        numbers = [self.regimes.of(length) for sequence in sequences for length in sequence.lengths]
        return self.regimes.during(numbers[0] if len(set(numbers)) == 1 else torch.tensor([numbers]))

    def prepare_capture(self, first: int, last: int, captured: CapturedStates) -> None:
        """Gives `captured` a key per depth at which a pass through layers [first, last) captures: see `Gates.run`."""
        for depth in self._captured_depths:
            if first < depth < last:
                captured[depth] = _NOTHING

    @inference
    def embed(self, token_ids: Tensor, base: int = 0) -> Tensor:
        """As `Runner.embed`, for B rows: token_ids [B, Q] -> [B, Q, D]."""
        if self.embedding_is_direct:
            rows: Tensor = self.loaded.parts.embedding(token_ids)
            return rows
        cache = self.new_cache(base + token_ids.shape[1])
        cache.begin(base, token_ids.shape[1])
        return self.gates.run(0, 0, None, input_ids=token_ids, cache=cache, use_cache=True)

    @inference
    def normed(self, state: Tensor) -> Tensor:
        """The final norm of states [..., D]. A model without a final norm returns the states themselves."""
        norm = self.loaded.parts.final_norm
        return state if norm is None else norm(state)

    @inference
    def logits(self, state: Tensor, *, widens: bool = True) -> Tensor:
        """See `Runner.logits`. `widens`: to float32; else they are as the head gives them."""
        if self.head_is_direct:
            logits: Tensor = self.loaded.parts.head(self.normed(state))
            return logits.float() if widens else logits
        flat = state.reshape(1, -1, state.shape[-1])
        return self._model_head(flat).reshape(*state.shape[:-1], -1)

    @inference
    def choices(self, states: Tensor) -> Tensor:
        """See `Runner.choices`. Where the head is one packed matrix, its logits are compared where they are made:
        those of a large vocabulary take a tenth of a pass to write and to read again."""
        head = self.loaded.parts.head
        product = head.forward
        if not self.head_is_direct or not isinstance(product, partial) or product.func is not ops.packed_linear:
            return largest(self.logits(states))
        if product.keywords["bias"] is not None or head._forward_hooks or head._forward_pre_hooks:
            return largest(self.logits(states))
        return ops.choose_packed(self.normed(states), product.keywords["packed"], product.keywords["out_features"])

    @inference
    def capture(
        self, token_ids: Tensor, depths: Sequence[int], *, attention_mask: Tensor | None = None
    ) -> dict[int, Tensor]:
        """One pass of all layers over tokens [B, Q] without a cache.
        Returns the states at `depths` (L included), each [B, Q, D]."""
        return self.gates.capture(depths, input_ids=token_ids, attention_mask=attention_mask, use_cache=False)

    def _model_head(self, state: Tensor) -> Tensor:
        tokens = torch.ones(state.shape[:2], dtype=torch.long, device=state.device)
        return self.gates.head(state, input_ids=tokens, use_cache=False).float()

    @inference
    def _check_direct_head(self) -> bool:
        """Whether final norm + head is all that the model does after its layers: no scaling, capping or projection."""
        generator = torch.Generator().manual_seed(0)
        state = torch.randn(1, 3, self.loaded.hidden_size, generator=generator)
        state = 10 * state.to(self.loaded.device, self.loaded.model.dtype)
        expected = self._model_head(state)
        try:
            direct = self.loaded.parts.head(self.normed(state)).float()
        except RuntimeError as error:  # a projection stands between norm and head, as in some OPT models
            refuse_if_out_of_memory(error)
            return False
        scale = expected.abs().max().clamp_min(1e-9)
        return direct.shape == expected.shape and bool((direct - expected).abs().max() <= HEAD_TOLERANCE * scale)

    @inference
    def _check_direct_embedding(self) -> bool:
        """Whether layer 0 receives the rows of the embedding: the model adds no positions, norm, scale or
        projection."""
        count = min(8, self.loaded.vocabulary_size, self.loaded.context_length - 1)
        tokens = torch.arange(count, device=self.loaded.device)[None]
        rows = self.loaded.parts.embedding(tokens)
        for place in origins(self.loaded.model.config, self.loaded.context_length):
            entering = self.embed(tokens, base=max(place, 1))
            if rows.shape != entering.shape or not torch.equal(rows, entering):
                return False
        return True

    @inference
    def _check_direct_pass(self) -> tuple[DirectPass | None, str]:
        """A direct pass that gives the bits of the model's own forward, across every border. Or why there is none."""
        if not self.gates.all_fused:
            return None, "not all layers are one op"
        try:
            direct = DirectPass(self.loaded, self.gates)
        except Unsuitable as reason:
            return None, str(reason)
        why_not = self._recall("pass is direct", lambda: self._why_not_direct(direct))
        return (None, why_not) if why_not else (direct, "")

    def _why_not_direct(self, direct: DirectPass) -> str:
        for place in origins(self.loaded.model.config, self.loaded.context_length):
            if not self._is_direct_at(place, direct):
                return f"it would give other bits from position {place} on"
        return ""

    def _is_direct_at(self, place: int, direct: DirectPass) -> bool:
        """Whether passes over positions from `place` on have the same bits."""
        counts = (4, 1, 4)
        depth = self._kinds.told_apart_by(direct.inputs).depth
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.loaded.vocabulary_size, (1, sum(counts)), generator=generator)
        cache, twin = (self.new_cache(sum(counts)) for _ in range(2))
        cache.origin = twin.origin = place
        base = 0
        for part in ids.split(counts, 1):
            count = min(part.shape[1], self.loaded.context_length - place - base)
            if count <= 0:
                break
            part = part[:, :count]
            expected = self.run(part, cache, first=0, last=depth, base=base)
            twin.begin(base, count)
            span = Span(place + base, place + base + count, place)
            out = direct.run(0, depth, None, part, twin, [span], None)
            if out is None or not torch.equal(out, expected):
                return False
            base += count
        return True

    def _run_one_token(self) -> ContiguousCache:
        cache = self.new_cache(1)
        token = torch.zeros(1, 1, dtype=torch.long, device=self.loaded.device)
        self.run(token, cache, first=0, last=self.num_layers, base=0)
        return cache


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
                    self._run_all(ids[:, :held], caches[0], 0, read)
                    caches[1].copy(caches[0], 0, held)
                alone.append(self._run_all(ids[:, held:], caches[0], held, read))
            except _CANNOT as error:
                refuse_if_out_of_memory(error)
                return False  # it cannot begin late, so it cannot be checked
            sequences.append(RaggedSequence(caches[1], held, length - held, read))
            tokens.append(ids[:, held:])
        expected, asked, last = torch.cat(alone, 1), torch.cat(tokens, 1), self.tried_depth
        try:
            self.run_ragged(asked.flip(1), sequences, first=0, last=last)
            together = self.run_ragged(asked, sequences, first=0, last=last)
        except _CANNOT as error:
            refuse_if_out_of_memory(error)
            return False  # the family's own code looks inside the objects of `substitution.ragged`
        scale = expected.abs().max().clamp_min(1e-9)
        return bool((together - expected).abs().max() <= RAGGED_TOLERANCE * scale)

    def _run_all(self, ids: Tensor, cache: KVCache, base: int, read_length: int) -> Tensor:
        last = self.tried_depth
        return self.run(ids, cache, first=0, last=last, base=base, read_length=read_length)


def _regimes_of(loaded: LoadedModel) -> Regimes:
    """Those of the model up to its context length. They are found once."""
    by_length: dict[int, Regimes] = vars(loaded.model).setdefault("_neap_regimes", {})
    if loaded.context_length not in by_length:
        name = f"has one regime, {loaded.context_length}"
        regimes = Regimes()
        if not loaded.facts.earlier.get(name):
            regimes = find_regimes(loaded.model, loaded.context_length)
            loaded.facts.note(name, not regimes.are_several)
        by_length[loaded.context_length] = regimes
    return by_length[loaded.context_length]


def _gates_of(loaded: LoadedModel) -> Gates:
    """The model's gates. A model is patched once, however many runners are made for it."""
    gates = getattr(loaded.model, "_neap_gates", None)
    if gates is None:
        gates = Gates(loaded.model, loaded.parts.layers)
        object.__setattr__(loaded.model, "_neap_gates", gates)
    assert isinstance(gates, Gates)
    return gates
