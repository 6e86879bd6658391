"""Passes through fused layers without the model's own forward around them.

Where all layers are one op, what the model's forward does around it (its decorators, the mask, the angles, the loop
over the layers, a final norm that nobody reads) takes a tenth of a pass. A direct pass is the embedding, where a model
has them also that of positions, angles from tables, and the op.

No model family is named here. An ordinary pass is watched: what the first layer gets, which module makes each layer's
angles, and which mask each layer gets. The direct pass is used only if the angles of a position never change and the
same tokens give the same bits. Everything else, such as a model with hooks, goes through the model's own forward.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.model.borders import borders
from shared.model.cache import ContiguousCache
from shared.model.cache_argument import with_cache
from shared.model.gates import Gates
from shared.model.loaded import LoadedModel
from shared.model.ragged import RaggedCache
from shared.model.substitution.attention import attention_mask as causal_mask
from shared.model.substitution.attention import masks_made_by, ragged_mask
from shared.model.substitution.layer import Hooks
from shared.model.substitution.match import Unsuitable
from shared.model.substitution.plan import Angles
from shared.model.substitution.ragged import Span
from shared.model.substitution.trace import GIVEN, by_name

_FIRST_ROWS = 256  # positions in a new table of angles
_MOST_OFFSET = 8  # rows before that of position 0 in an embedding of positions
_PROBED = 8  # positions whose angles are compared with those of the module, each alone


class AngleTable:
    """The cosines and sines [1, P, R] that a rotary module gives positions 0 to P - 1.
    It grows when a later position is asked for."""

    def __init__(
        self,
        module: nn.Module,
        like: Tensor,
        context_length: int,
        borders: Sequence[int] = (),
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`like` [1, Q, D]: a state that the module has been called with. `borders`: positions where angles may change.
        `settings`: further arguments of the call.

        Raises `Unsuitable` if the angles of a position depend on the other positions of the pass.
        """
        self._module = partial(module, **settings)
        self._like = like[:, :1].clone()
        self._cos, self._sin = self._of(range(min(_FIRST_ROWS, context_length)))
        near = {border + step for border in borders for step in (-1, 0, 1)}
        far = {*range(_PROBED), context_length // 2, context_length - 1, *near}
        self._check_independent(sorted(p for p in far if p < context_length))

    def _check_independent(self, far: Sequence[int]) -> None:
        together = self._of(far)
        for index, position in enumerate(far):
            alone = self._of([position])
            rows = [part[:, index : index + 1] for part in together]
            if position < self._cos.shape[1]:
                rows += [part[:, position : position + 1] for part in (self._cos, self._sin)]
            if not all(map(torch.equal, rows, alone * (len(rows) // 2))):
                raise Unsuitable("the angles of a position depend on the rest of the pass")

    def _of(self, positions: Sequence[int]) -> Angles:
        angles = self._module(self._like, position_ids=torch.tensor([list(positions)]))
        cos, sin = angles
        return cos, sin

    def of(self, spans: Sequence[Span]) -> Angles:
        """The angles [1, T, R] of the positions of all spans, one span after another."""
        parts: list[Angles] = []
        for span in spans:
            if span.origin:  # a check: the table need not hold all positions before
                parts.append(self._of(range(span.start, span.end)))
                continue
            if span.end > self._cos.shape[1]:
                self._grow(span.end)
            parts.append((self._cos[:, span.start : span.end], self._sin[:, span.start : span.end]))
        if len(parts) == 1:
            return parts[0]
        return torch.cat([cos for cos, _ in parts], 1), torch.cat([sin for _, sin in parts], 1)

    def _grow(self, length: int) -> None:
        known = self._cos.shape[1]
        cos, sin = self._of(range(known, max(length, 2 * known)))
        self._cos, self._sin = torch.cat([self._cos, cos], 1), torch.cat([self._sin, sin], 1)


class DirectPass:
    """Runs layers [first, last) of one model. Not thread-safe: it uses the model's gates."""

    def __init__(self, loaded: LoadedModel, gates: Gates) -> None:
        """Raises `Unsuitable` with the reason why the model's own forward is needed."""
        self._embedding = loaded.parts.embedding
        self._gates, self._scales_queries = gates, gates.scales_queries
        calls, self._masks, self.inputs, self._positions, self._per_layer = _watch(loaded)
        edges = borders(loaded.model.config, loaded.context_length)
        self._tables = [
            AngleTable(module, state, loaded.context_length, edges, settings) for module, state, settings in calls
        ]
        # The different pairs of angles and mask that layers get, and that of each layer.
        self._given = list(dict.fromkeys(self.inputs))
        self._kinds = [self._given.index(pair) for pair in self.inputs]
        # A direct pass calls no hooks. If there are any, it is not used.
        self._hooks = Hooks(loaded.model.base_model.modules())

    def run(
        self,
        first: int,
        last: int,
        hidden: Tensor | None,
        token_ids: Tensor,
        cache: ContiguousCache | RaggedCache,
        spans: Sequence[Span],
        captured: dict[int, Tensor] | None,
    ) -> Tensor | None:
        """As `Gates.run`, for tokens [B, T] at the positions of `spans`.
        None, if the model's own forward has to run this pass.

        Keys and values may have been written in that case. The other pass writes them again.
        """
        if self._hooks.are_any():
            return None
        state = hidden
        if state is None:
            # Without the module's call around it, whose hooks have just been looked at.
            state = self._embedding.forward(token_ids)
            if self._positions is not None:
                state = self._placed(state, *self._positions, spans)
        tables = [table.of(spans) for table in self._tables]
        masks = [() if mask.causal_until == math.inf else mask.of(spans, len(token_ids)) for mask in self._masks]
        given = [
            (None if of_angles is None else tables[of_angles], masks[of_mask]) for of_angles, of_mask in self._given
        ]
        positions = _places(spans)[None] if self._scales_queries else None
        own = None if self._per_layer is None else self._per_layer(token_ids)
        return self._gates.run_stacked(first, last, state, given, self._kinds, cache, captured, positions, own)

    @staticmethod
    def _placed(rows: Tensor, weight: Tensor, offset: int, spans: Sequence[Span]) -> Tensor:
        """`rows` [B, T, D] of the embedding, with those of the positions."""
        return rows + F.embedding(_places(spans) + offset, weight)


def _places(spans: Sequence[Span]) -> Tensor:
    """The positions [T] of the tokens of all spans."""
    return torch.cat([torch.arange(span.start, span.end) for span in spans])


class _Mask(NamedTuple):
    """A mask that layers get. `causal_until`: the length of the longest sequence whose mask is causal. `settings`: the
    arguments that make it for others."""

    causal_until: float
    settings: dict[str, Any]

    def of(self, spans: Sequence[Span], rows: int) -> tuple[Tensor, ...]:
        """The spans of each sequence, as `decoder_layers` takes them. One span is that of all rows."""
        if all(span.end <= self.causal_until for span in spans):
            return ()
        masks = ragged_mask(spans, **self.settings).masks
        return masks if len(masks) > 1 else masks * rows


class _Watched(NamedTuple):
    """`angles`: the different calls that make angles: a module, a state, and further arguments. `layers`: by layer, the
    number of the call that makes its angles, None if it gets none, and that of its mask. `positions`: the matrix whose
    rows are added to those of the embedding, and which of them is that of position 0. `per_layer`: makes what layers
    are given of tokens [B, T] beside the state [B * T, L, P], if they are."""

    angles: list[tuple[nn.Module, Tensor, dict[str, Any]]]
    masks: list[_Mask]
    layers: list[tuple[int | None, int]]
    positions: tuple[Tensor, int] | None
    per_layer: Callable[[Tensor], Tensor] | None


def _watch(loaded: LoadedModel) -> _Watched:
    """Runs three tokens through the model's own forward.
    Raises `Unsuitable` if its layers are not called as a direct pass would do."""
    outputs: list[tuple[object, tuple[nn.Module, Tensor, dict[str, Any]]]] = []
    layer_calls: list[tuple[Tensor, object, object]] = []
    own: list[Tensor | None] = []
    masks: list[tuple[object, _Mask]] = []

    def note_output(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
        args, kwargs = by_name(type(module), args, kwargs)
        if args and isinstance(args[0], Tensor):
            outputs.append((out, (module, args[0], {k: v for k, v in kwargs.items() if k != "position_ids"})))

    def note_call(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args, kwargs = by_name(type(layer), args, kwargs)
        state = args[0] if args else kwargs["hidden_states"]
        layer_calls.append((state, kwargs.get("position_embeddings"), kwargs.get("attention_mask")))
        own.append(kwargs.get(GIVEN))

    def make_mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        attention_mask: object = None,
        allow_is_causal_skip: bool = True,
        **settings: Any,
    ) -> object:
        """A tensor of its own, by which the layers that get it are known."""
        size = settings.get("local_size")
        causal_until = (math.inf if size is None else size - 1) if allow_is_causal_skip else 0
        settings["allow_is_causal_skip"] = False
        sizes = batch_size, q_length, kv_length, q_offset, kv_offset
        made = causal_mask(*sizes, **settings)
        masks.append((made, _Mask(causal_until, settings)))
        return made

    model, layers = loaded.model.base_model, list(loaded.parts.layers)
    around = [module for module in model.modules() if module not in layers]
    hooks = [module.register_forward_hook(note_output, with_kwargs=True) for module in around]
    hooks += [layer.register_forward_pre_hook(note_call, with_kwargs=True) for layer in layers]
    count = min(3, loaded.context_length)
    ids = torch.zeros(1, count, dtype=torch.long)
    cache = ContiguousCache(count, loaded.kv_dtype)
    cache.begin(0, count)
    try:
        with masks_made_by(make_mask):
            model(input_ids=ids, **with_cache(model, cache), use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    made = {_same(out): number for number, (out, _) in enumerate(outputs) if type(out) is tuple}
    numbers = {_same(mask): number for number, (mask, _) in enumerate(masks)}
    if any(angles is not None and _same(angles) not in made for _, angles, _ in layer_calls):
        raise Unsuitable("its layers get angles that no module has made")
    if any(_same(mask) not in numbers for _, _, mask in layer_calls):
        raise Unsuitable("it makes its masks itself")
    sources = list(dict.fromkeys(made[_same(angles)] for _, angles, _ in layer_calls if angles is not None))
    of_layers = [
        (None if angles is None else sources.index(made[_same(angles)]), numbers[_same(mask)])
        for _, angles, mask in layer_calls
    ]
    entering, rows = layer_calls[0][0], loaded.parts.embedding.forward(ids)
    positions = None if torch.equal(entering, rows) else _positions(entering, rows, [call for _, call in outputs])
    calls = [outputs[source][1] for source in sources]
    return _Watched(calls, [mask for _, mask in masks], of_layers, positions, _per_layer(loaded, ids, own))


def _same(made: object) -> object:
    """Equal for a tensor or several that are kept alive, and for views of all of them."""
    if isinstance(made, tuple):
        return tuple(map(_same, made))
    return (made.data_ptr(), made.shape) if isinstance(made, Tensor) else id(made)


def _per_layer(loaded: LoadedModel, ids: Tensor, own: Sequence[Tensor | None]) -> Callable[[Tensor], Tensor] | None:
    """What makes `own`, which layers are given of the tokens `ids`: the methods that models of transformers have for
    it. None if they are given nothing. Raises `Unsuitable` if it is made otherwise."""
    if all(given is None for given in own):
        return None
    names = ("get_per_layer_inputs", "project_per_layer_inputs")
    models: list[Any] = [m for m in loaded.model.modules() if all(hasattr(m, name) for name in names)]
    for model in models:

        def make(token_ids: Tensor, model: Any = model) -> Tensor:
            rows = loaded.parts.embedding.forward(token_ids)
            made: Tensor = model.project_per_layer_inputs(rows, model.get_per_layer_inputs(token_ids, rows))
            return made.flatten(0, 1)

        for_layers = make(ids).unbind(1)
        same = len(for_layers) == len(own)
        if same and all(g is not None and torch.equal(g[0], made) for g, made in zip(own, for_layers, strict=True)):
            return make
    raise Unsuitable("its layers are given something that it makes itself")


def _positions(entering: Tensor, rows: Tensor, calls: Sequence[tuple[nn.Module, Any, Any]]) -> tuple[Tensor, int]:
    """The matrix whose rows from a number on have been added to `rows`, and that number. Raises `Unsuitable`."""
    for weight in (module.weight for module, *_ in calls if isinstance(module, nn.Embedding)):
        for first in range(min(_MOST_OFFSET, len(weight) - rows.shape[1])):
            added = F.embedding(torch.arange(first, first + rows.shape[1]), weight)
            if added.shape == rows.shape[1:] and torch.equal(entering, rows + added):
                return weight, first
    raise Unsuitable("the model does more than look up rows of its embedding")
