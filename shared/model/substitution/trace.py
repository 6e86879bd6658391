"""What a decoder layer runs in one pass: which replaced modules, attention and other operations, and what they read and
make."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shared.model.cache_argument import cache_among
from shared.model.handed_on import noted
from shared.model.substitution.attention import observed
from shared.model.substitution.match import Recipe, Substitute, Unsuitable

# The argument in which a layer gets what a model has made of each token for it alone.
GIVEN = "per_layer_input"
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class OfPositions:
    """A tensor that a layer makes of its tokens' positions alone: the call of an operation whose tensors are such, too,
    or the positions if there is none. Equal ones are computed alike."""

    func: Any = None
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    def of(self, positions: Tensor) -> Tensor:
        """The tensor for other positions [B, Q]."""
        if self.func is None:
            return positions
        args = (each.of(positions) if isinstance(each, OfPositions) else each for each in self.args)
        made: Tensor = self.func(*args, **dict(self.kwargs))
        return made


# What a layer may do beside its modules, rotation and attention: move numbers, add states, and scale the queries by a
# number. The fused layer would leave anything else out, and a clamp or a scale may have no effect on the tokens with
# which the layers are compared.
MOVES = frozenset(("alias", "view", "_unsafe_view", "transpose", "slice", "split", "split_with_sizes", "expand"))
MOVES |= {"unsqueeze", "clone", "copy_", "cat"}


def by_name(kind: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The arguments of a call of a layer of class `kind`, all but the first by their names."""
    if len(args) < 2:
        return args, kwargs
    return args[:1], {**kwargs, **dict(zip(_parameters(kind.forward)[2:], args[1:], strict=False))}


@functools.cache
def _parameters(function: Callable[..., Any]) -> list[str]:
    return [*inspect.signature(function).parameters]


@dataclass(frozen=True)
class _View:
    """The address of a tensor [B, H, Q, D], and how far its heads are apart."""

    start: int
    head: int

    @classmethod
    def of(cls, states: Tensor) -> "_View":
        return cls(states.data_ptr(), states.stride(1))


@dataclass(frozen=True)
class Attention:
    """The sizes and parameters of one call of our attention."""

    num_heads: int
    num_kv_heads: int
    width: int
    value_width: int
    scaling: float
    softcap: float | None
    sinks: Tensor | None


@dataclass(frozen=True)
class Event:
    """A replaced module or attention that has run, and the addresses of what it has read and made."""

    what: Recipe | Attention
    read: int
    made: int


class Trace(TorchDispatchMode):
    """What a layer does within it: `state`, the address of what it reads; `events`, in order; `others`, the names of
    operations that are neither ours nor moves; `scaled`, the addresses of tensors that were multiplied by a number;
    `query_scales`, tensors made of positions by the address of what they were multiplied to make; `views` of queries,
    keys and values before rotation; `rotates`, whether there was one; `half_angles`, the number of the layer's
    angles if it had each of them twice, else 0; `is_given`, whether something was multiplied by `given`; `scales`,
    single numbers in a tensor that something was multiplied by; `reads_kv` and `hands_on`, the names by which it gets
    keys and values of an earlier layer, and later ones get its own.
    """

    def __init__(
        self, state: Tensor, positions: object = None, num_angles: int = 0, given: Tensor | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state = state.data_ptr()
        self.events: list[Event] = []
        self.others: list[str] = []
        self.scaled: list[tuple[int, float]] = []
        self.query_scales: dict[int, OfPositions] = {}
        self.views: dict[str, _View] = {}
        self.rotates, self.half_angles = False, 0
        self.is_given = False
        self.scales: list[Tensor] = []
        self.reads_kv: frozenset[Any] = frozenset()
        self.hands_on: frozenset[Any] = frozenset()
        self._given = given
        self._num_angles = num_angles
        self._kept: list[Any] = [state]  # so that addresses stay those of one tensor
        self._of_positions: dict[int, OfPositions] = {id(positions): OfPositions()}

    def add(self, what: Any, read: Any, made: Any) -> None:
        self._kept += (read, made)
        self.events.append(Event(what, *(each.data_ptr() if isinstance(each, Tensor) else 0 for each in (read, made))))

    def see(self, **states: Tensor) -> None:
        """Notes queries, keys and values, unless they were seen before."""
        self._kept += states.values()
        self.views = {name: _View.of(each) for name, each in states.items()} | self.views

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in args if isinstance(each, Tensor)]
        of_positions = [self._of_positions.get(id(each)) for each in tensors]
        if of_positions and all(of_positions) and isinstance(out, Tensor) and not func._schema.is_mutable:
            call = (
                self._of_positions.get(id(each), each) if isinstance(each, Tensor) else _frozen(each) for each in args
            )
            self._of_positions[id(out)] = OfPositions(func, (*call,), tuple((kwargs or {}).items()))
            self._kept.append(out)
            return out
        if name == "rotary":
            self.see(q=args[0], k=args[1])
            self.rotates = True
            self.half_angles = self._num_angles * (args[2].shape[-1] == 2 * self._num_angles)
        elif func.namespace != "neap" and name not in MOVES:
            if name == "mul" and isinstance(args[1], float):
                self.scaled.append((args[0].data_ptr(), args[1]))
            elif name == "mul" and len(of_positions) == 2 and of_positions[1] is not None:
                self._kept.append(out)
                self.query_scales[out.data_ptr()] = of_positions[1]
            elif name in ("mul", "mul_") and self._is_given(args[1]) and not self.is_given:
                self.is_given = True
            elif name in ("mul", "mul_") and isinstance(args[1], Tensor) and args[1].shape == (1,):
                self.scales.append(args[1])
            else:
                self.others.append(name.removesuffix("_"))
        return out

    def _is_given(self, factor: object) -> bool:
        return self._given is not None and isinstance(factor, Tensor) and factor.data_ptr() == self._given.data_ptr()


def _frozen(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, list) else argument


def watch(layer: nn.Module, substitutes: Mapping[nn.Module, Substitute], call: Call) -> Trace:
    """What `layer` runs in `call`. Raises `Unsuitable` if the layer returns a tuple."""
    args, kwargs = call
    state, inside = args[0] if args else kwargs["hidden_states"], set(layer.modules())
    angles = kwargs.get("position_embeddings")
    first = angles[0] if type(angles) is tuple and angles else None
    num_angles = first.shape[-1] if isinstance(first, Tensor) else 0
    trace = Trace(state, kwargs.get("position_ids"), num_angles, kwargs.get(GIVEN))
    cache = cache_among(kwargs)
    kwargs, handed_on = noted(kwargs)

    def note(what: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            made = forward(*args, **kwargs)
            trace.add(what, next(iter((*args, *kwargs.values())), None), made)
            return made

        return run

    def see(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **kwargs: Any) -> None:
        if module in inside:
            scaling, softcap = kwargs.get("scaling"), kwargs.get("softcap")
            scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
            sizes = (query.shape[1], key.shape[1], key.shape[3], value.shape[3])
            trace.see(q=query)
            trace.add(Attention(*sizes, scaling, softcap, kwargs.get("s_aux")), query, None)

    def write(keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        trace.see(k=keys, v=values)
        return type(cache).update(cache, keys, values, *args, **kwargs)

    substituted = [(module, substitutes[module], module.forward) for module in inside if module in substitutes]
    try:
        for module, substitute, forward in substituted:
            module.forward = note(substitute.recipe, forward)
        if cache is not None:
            cache.update = write
        with observed(see), trace:
            output = layer(*args, **kwargs)
    finally:
        for module, _, forward in substituted:
            module.forward = forward
        if cache is not None:
            del cache.update
    if not isinstance(output, Tensor):
        raise Unsuitable("returns more than its state")
    if handed_on is not None:
        trace.reads_kv, trace.hands_on = frozenset(handed_on.read), frozenset(handed_on.written)
    return trace
