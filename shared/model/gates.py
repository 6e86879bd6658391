"""Runs only the decoder layers [first, last), through the model's own forward.

Each layer's `forward` is replaced on the instance by a gate. A gate outside the range returns the hidden state
unchanged. The gate at `first` replaces the hidden state by the saved one, and the gate at `last - 1` keeps the layer's
output. The model itself still computes masks, positions, rotary tables and scaling, so no family needs code of its own.
State-dict keys do not change.

Fused layers that the model calls with the same arguments run as one op, at the gate of the first of them. The gates of
the others return the hidden state unchanged.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from shared.errors import UnsupportedModel
from shared.model.cache_argument import LAYER_CACHE_ARGUMENTS, cache_among, with_cache
from shared.model.handed_on import noted
from shared.model.substitution.layer import Hooks, LayerStack, run_plan
from shared.model.substitution.plan import FusedCache, Given
from shared.model.substitution.trace import by_name

LayerOutput = Tensor | tuple[Any, ...]
Forward = Callable[..., LayerOutput]

log = structlog.get_logger("neap.model")

# The arguments beside the hidden state that must be the same objects for all layers that run as one op.
_SHARED_ARGUMENTS = ("attention_mask", "position_embeddings", *LAYER_CACHE_ARGUMENTS)


class _CalledDifferently(Exception):
    """Layer `index` has run as one op with others, and the model calls it with other arguments than the first of
    them."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class LayerCounters:
    """The layers that ran: `per_layer[i]` calls of layer i, and `token_layers`, the tokens summed over all calls."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        # (first, last) -> passes. Few passes differ in these, and a step has no time to count layers.
        self._passes: Counter[tuple[int, int]] = Counter()
        self.token_layers = 0

    @property
    def per_layer(self) -> list[int]:
        passes = self._passes.items()
        return [
            sum(count for (first, last), count in passes if first <= layer < last) for layer in range(self._num_layers)
        ]

    @property
    def layer_executions(self) -> int:
        return sum(count * (last - first) for (first, last), count in self._passes.items())

    def reset(self) -> None:
        self._passes.clear()
        self.token_layers = 0

    def add(self, first: int, last: int, num_tokens: int) -> None:
        """Counts a pass of `num_tokens` tokens through layers [first, last)."""
        self._passes[first, last] += 1
        self.token_layers += num_tokens * (last - first)

    def copy(self) -> "LayerCounters":
        return deepcopy(self)


class Gates:
    """The gates of one model. Not thread-safe and not re-entrant: one thread runs the model."""

    def __init__(self, model: PreTrainedModel, layers: nn.ModuleList) -> None:
        self.num_layers = len(layers)
        self.counters = LayerCounters(self.num_layers)
        self._model = model
        self._first, self._last = 0, self.num_layers
        self._entering: Tensor | None = None
        self._leaving: Tensor | None = None
        self._captured: dict[int, Tensor] | None = None
        # 0 if layers return a tensor, n if they return a tuple of n; None before the first call.
        self._tuple_length: int | None = None
        # Each layer's own forward, bound; and the forwards that the current pass runs.
        self.forwards: tuple[Forward, ...] = tuple(layer.forward for layer in layers)
        self._running = self.forwards
        kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
        self._stack: LayerStack | None = LayerStack(self.forwards, kinds or [""] * len(layers))
        # Layers below this number have run already in this pass, as one op, with these arguments.
        self._stacked_until = 0
        self._stacked_with: list[tuple[str, object]] = []
        # The layers that hand on keys and values, by the names that they give them; and by the layers that read them.
        self._handed_on_by: dict[Any, int] = {}
        self.kv_layers: dict[int, int] = {}
        # Whether layers may run as one op: not if somebody calls the model directly, who could not repeat the pass.
        self._may_stack = False
        self._hooks = Hooks(layers.modules())
        for index, layer in enumerate(layers):
            layer.forward = self._gated(index, type(layer))
        self._learn_output_form()

    def _gated(self, index: int, kind: type[nn.Module]) -> Forward:
        def gate(*args: Any, **kwargs: Any) -> LayerOutput:
            return self._pass(index, *by_name(kind, args, kwargs))

        return gate

    def _pass(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerOutput:
        if index < self._stacked_until:
            return self._stacked_output(index, args, kwargs)
        if not self._first <= index < self._last:
            hidden = args[0] if args else kwargs["hidden_states"]
            if self._last == index == 0:
                self._leaving = hidden
            if self._first == self.num_layers == index + 1 and self._entering is not None:
                # No layer runs, only the final norm and the head.
                hidden = self._entering
            if self._tuple_length:
                return (hidden,) + (None,) * (self._tuple_length - 1)
            return hidden  # type: ignore[no-any-return]
        if index == self._first and self._entering is not None:
            if args:
                args = (self._entering, *args[1:])
            else:
                kwargs["hidden_states"] = self._entering
        if self._captured is not None and index in self._captured:
            self._captured[index] = args[0] if args else kwargs["hidden_states"]
        kwargs, handed_on = noted(kwargs)
        if handed_on is not None and index == self._first:
            # Those of layers that this pass leaves out are in the cache.
            earlier = ((name, layer) for name, layer in self._handed_on_by.items() if layer < index)
            handed_on.data.update((name, cache_among(kwargs).seen(layer)) for name, layer in earlier)
        output = self._output_of(index, args, kwargs)
        if handed_on is not None:
            self._handed_on_by |= dict.fromkeys(handed_on.written, index)
            for name in handed_on.read:
                self.kv_layers[index] = self._handed_on_by[name]
        hidden = output[0] if isinstance(output, tuple) else output
        if self._tuple_length is None:
            self._tuple_length = len(output) if isinstance(output, tuple) else 0
        end = max(index + 1, self._stacked_until)
        self.counters.add(index, end, hidden.shape[0] * hidden.shape[1])
        if end == self._last:
            self._leaving = hidden
        return output

    def _stacked_output(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerOutput:
        """The state as it is, because layer `index` has run with others before it. Raises `_CalledDifferently`."""
        for name, value in self._stacked_with:
            if kwargs.get(name) is not value:
                raise _CalledDifferently(index)
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        return hidden

    def _output_of(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerOutput:
        """The output of layer `index`, or of the last of the layers that run as one op with it."""
        may_stack = self._may_stack and self._running is self.forwards and not self._hooks.are_any()
        if self._stack is not None and may_stack:
            stops = [depth for depth in self._captured or () if index < depth < self._last]
            plan = self._stack.plan(index, min([*stops, self._last]), of_one_kind=True)
            if plan is not None and len(plan.kv_layers) > 1 and (out := run_plan(plan, args, kwargs)) is not None:
                self._stacked_until = index + len(plan.kv_layers)
                self._stacked_with = [(name, kwargs.get(name)) for name in _SHARED_ARGUMENTS]
                return out
        return self._running[index](*args, **kwargs)

    def _run_model(self, cache: Cache | None = None, **inputs: Any) -> None:
        """The model's own forward, which calls the gates."""
        model = self._model.base_model
        if cache is not None:
            inputs |= with_cache(model, cache)
        opened = self._first, self._last, self._entering
        counted = self.counters.copy()
        self._may_stack = True
        try:
            model(**inputs)
        except _CalledDifferently as different:
            log.info("layers run one by one: their arguments differ", layer=different.index)
            self._stack = None
            self.counters = counted
            self._open(*opened)
            # Keys and values that the op has written are written again.
            model(**inputs)
        finally:
            self._may_stack = False

    def _learn_output_form(self) -> None:
        token = torch.ones(1, 1, dtype=torch.long, device=self._model.device)
        with torch.no_grad():
            self._model.base_model(input_ids=token, use_cache=False)
        why = ""
        if self._leaving is None:
            why = "its forward did not call the layers found"
        elif self._leaving.dim() != 3:
            why = f"a token's state between layers has the shape {list(self._leaving.shape[2:])}, not one dimension"
        if why:
            architecture = type(self._model).__name__
            raise UnsupportedModel(
                f"{architecture} cannot be run in parts: {why}", metadata={"architecture": architecture}
            )
        self.counters = LayerCounters(self.num_layers)

    def run(
        self,
        first: int,
        last: int,
        entering: Tensor | None,
        *,
        forwards: tuple[Forward, ...] | None = None,
        captured: dict[int, Tensor] | None = None,
        **inputs: Any,
    ) -> Tensor:
        """Runs layers [first, last). `entering`: the state at depth `first` [B, Q, D].
        Returns the state at depth `last` [B, Q, D].

        `inputs`: what the model's own forward gets. `cache` among them is the KV cache, whatever the forward calls it.

        [0, 0) runs no layer and returns the state at depth 0. `forwards`: one per layer, run in place of the layers'
        own. `captured`: the state at each depth that is a key, in [first, last), becomes its value, [B, Q, D].
        """
        assert (entering is None) == (first == 0)
        assert 0 <= first < last <= self.num_layers or first == last == 0
        self._open(first, last, entering)
        self._running = forwards or self.forwards
        self._captured = captured
        try:
            self._run_model(**inputs)
            assert self._leaving is not None
            return self._leaving
        finally:
            self._reset()

    @property
    def all_fused(self) -> bool:
        """Whether no layer needs its own forward, unless hooks are added later."""
        return self._stack is not None and self._stack.all_fused

    @property
    def scales_queries(self) -> bool:
        """Whether layers scale their queries by positions."""
        return self._stack is not None and self._stack.scales_queries

    def run_stacked(
        self,
        first: int,
        last: int,
        state: Tensor,
        given: Sequence[Given],
        kinds: Sequence[int],
        cache: FusedCache,
        captured: dict[int, Tensor] | None,
        positions: Tensor | None = None,
        per_layer_inputs: Tensor | None = None,
    ) -> Tensor | None:
        """As `run`, but only the fused layers, without the model's forward around them. `given`: angles and masks of
        each kind of layer. `kinds`: that of each layer. `positions` [1, Q]: those of the tokens, needed if layers scale
        their queries by them.
        None if a layer must run its own forward. Layers before it may have run then. Hooks are not called.
        """
        if self._stack is None:
            return None
        captured = {} if captured is None else captured
        depth = first
        while depth < last:
            plan = self._stack.plan(depth, last, of_one_kind=False)
            if plan is None:
                return None
            end, inside = depth + len(plan.kv_layers), dict[int, Tensor]()
            for stop in captured:
                if stop == depth:
                    captured[stop] = state
                elif depth < stop < end:
                    inside[stop - depth] = state
            own = None if per_layer_inputs is None else per_layer_inputs[:, depth:end]
            state = plan.run(state, given, cache, kinds[depth:end], inside, positions, own)
            for count, inner in inside.items():
                captured[depth + count] = inner
            depth = end
        self.counters.add(first, last, state.shape[0] * state.shape[1])
        return state

    def head(self, state: Tensor, **inputs: Any) -> Tensor:
        """Runs only the final norm and the head, through the model's own forward: state at depth L [B, Q, D] -> logits
        [B, Q, V]."""
        self._open(self.num_layers, self.num_layers, state)
        try:
            logits: Tensor = self._model(**inputs).logits
            return logits
        finally:
            self._reset()

    def capture(self, depths: Sequence[int], **inputs: Any) -> dict[int, Tensor]:
        """Runs all layers once. Returns the states at `depths` (L included), each [B, Q, D]."""
        self._open(0, self.num_layers, None)
        nothing = torch.empty(0)
        self._captured = {depth: nothing for depth in depths if depth < self.num_layers}
        try:
            self._run_model(**inputs)
            assert self._leaving is not None
            states = dict(self._captured)
            if self.num_layers in depths:
                states[self.num_layers] = self._leaving
            return states
        finally:
            self._reset()

    def _open(self, first: int, last: int, entering: Tensor | None) -> None:
        self._first, self._last, self._entering, self._leaving = first, last, entering, None
        self._stacked_until, self._stacked_with = 0, []

    def _reset(self) -> None:
        self._open(0, self.num_layers, None)
        self._captured = None
        self._running = self.forwards
