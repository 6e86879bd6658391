"""Rotary angles that depend on the length of the sequence, such as longrope's short and long factors.

The modules of transformers that make such angles choose the factors for a whole pass, by its largest position. That is
right for `generate` with one sequence: it reads the prompt in one pass and then token after token. The passes of an
engine are others: pieces of prompts, drafts, several sequences. So each token of a pass states its length: how long the
sequence was when `generate` would have run the token. Lengths with the same angles are one *regime*, and each token
gets the angles of its own.

Some models let `generate` read the whole sequence again when it outgrows a regime; `Regimes.rereads` are the lengths at
which they do.

No family is named. Modules that take positions are called with sequences of different lengths, around every border that
the configuration names.
"""

import inspect
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shared.errors import UnsupportedModel
from shared.model.borders import borders
from shared.model.cache import LengthlessCache, refuse_if_out_of_memory
from shared.model.cache_argument import with_cache

# Positions whose angles are compared under different lengths.
_COMPARED = 4

Forward = Callable[..., Any]


@dataclass
class Regimes:
    """`starts`: the smallest length of each regime, ascending from 1. `rereads`: lengths, ascending, at which
    `generate` reads all tokens again. A model whose angles do not depend on the length has one regime."""

    starts: tuple[int, ...] = (1,)
    rereads: tuple[int, ...] = ()
    # The regime of all tokens of the current pass, or of each [B or 1, T].
    # None: modules choose, by the largest position.
    current: int | Tensor | None = field(default=None, repr=False)

    @property
    def are_several(self) -> bool:
        return len(self.starts) > 1

    def of(self, length: int) -> int:
        """The number of the regime of a sequence of `length` tokens."""
        return bisect_right(self.starts, length) - 1

    def agree(self, read_length: int, prompt_length: int) -> bool:
        """Whether the keys of a sequence, of which so many tokens were read at once, serve a prompt of `prompt_length`
        tokens, as far as it goes."""
        return self.of(read_length) == self.of(prompt_length)

    def next_reread(self, length: int) -> int | None:
        """The first length above `length` at which all tokens are read again."""
        place = bisect_right(self.rereads, length)
        return self.rereads[place] if place < len(self.rereads) else None

    @contextmanager
    def during(self, current: int | Tensor | None) -> Iterator[None]:
        """Within it, tokens get the angles of these regimes."""
        self.current = current
        try:
            yield
        finally:
            self.current = None


def find_regimes(model: PreTrainedModel, context_length: int) -> Regimes:
    """Replaces the forward of modules whose angles depend on the length, if there are any, by one that obeys the
    returned `Regimes`.

    Raises `UnsupportedModel` (reason LENGTH_NOT_SUPPORTED) if angles change with the length in a way that is no regime.
    """
    starts_of: dict[nn.Module, tuple[int, ...]] = {}
    lengths = _lengths(model, context_length)
    for module, calls in _position_modules(model).items():
        try:
            starts = {start for call in calls for start in _starts(module, call, lengths)}
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            refuse_if_out_of_memory(error)
            continue  # it takes more than positions; `check_cuts` shows whether lengths matter
        if starts:
            starts_of[module] = tuple(starts)
    if not starts_of:
        return Regimes()
    starts = {start for of_module in starts_of.values() for start in of_module}
    regimes = Regimes((1, *sorted(starts)), tuple(n for n in lengths if n > 1 and _rereads(model, n)))
    for module in starts_of:
        module.forward = _obeying(regimes, module.forward)
    return regimes


def _lengths(model: PreTrainedModel, context_length: int) -> list[int]:
    """Lengths on both sides of each border, ascending, with the smallest and the largest."""
    near = {b + step for b in borders(model.config, context_length) for step in (-1, 0, 1, 2)}
    ends = {min(_COMPARED + 1, context_length), context_length}
    return sorted(n for n in near | ends if 0 < n <= context_length)


@dataclass(frozen=True)
class _Call:
    """What the model calls a module with, positions apart."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, forward: Forward, positions: Tensor) -> Any:
        return forward(*self.args, **{**self.kwargs, "position_ids": positions})


def _position_modules(model: PreTrainedModel) -> dict[nn.Module, list[_Call]]:
    """The modules without parts of their own that are called with `position_ids` in a pass over one token, and the
    calls."""
    seen: dict[nn.Module, list[_Call]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = list(inspect.signature(module.forward).parameters)
        bound = {**dict(zip(names, args, strict=False)), **kwargs}
        if isinstance(bound.pop("position_ids", None), Tensor):
            seen.setdefault(module, []).append(_Call((), bound))

    leaves = [m for m in model.base_model.modules() if not list(m.children())]
    takers = [m for m in leaves if "position_ids" in inspect.signature(m.forward).parameters]
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in takers]
    try:
        if takers:
            token = torch.ones(1, 1, dtype=torch.long, device=model.device)
            with torch.inference_mode():
                model.base_model(input_ids=token, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


@torch.inference_mode()
def _starts(module: nn.Module, call: _Call, lengths: Sequence[int]) -> Iterator[int]:
    """The lengths, of `lengths`, from which on the first positions get other angles."""
    before: list[Tensor] | None = None
    for previous, length in zip([0, *lengths], lengths, strict=False):
        device = next((v.device for v in call.kwargs.values() if isinstance(v, Tensor)), None)
        positions = torch.tensor([[*range(min(_COMPARED, length - 1)), length - 1]], device=device)
        angles = [a[..., : min(_COMPARED, length - 1), :] for a in _tensors(call.run(module.forward, positions))]
        if before is not None and not all(map(torch.equal, angles, before)):
            if length != previous + 1:
                raise UnsupportedModel(
                    f"the angles of {type(module).__name__} change between sequences of {previous} and {length} "
                    f"tokens, at a length that the configuration does not name; with a context of {previous} tokens "
                    "the model can be run",
                    reason="LENGTH_NOT_SUPPORTED",
                )
            yield length
        before = angles


def _tensors(output: Any) -> tuple[Tensor, ...]:
    return (output,) if isinstance(output, Tensor) else tuple(output)


def _obeying(regimes: Regimes, original: Forward) -> Forward:
    """The forward `original` of a module, but each token gets the angles of its regime."""

    def in_regime(number: int, positions: Tensor, args: Any, kwargs: Any) -> tuple[Any, tuple[Tensor, ...]]:
        # A module goes by the largest position, so one of the regime is put after the others.
        last_position = positions.new_full((*positions.shape[:-1], 1), regimes.starts[number] - 1)
        output = original(*args, position_ids=torch.cat([positions, last_position], -1), **kwargs)
        return output, tuple(part[..., :-1, :] for part in _tensors(output))

    def forward(*args: Any, position_ids: Tensor, **kwargs: Any) -> Any:
        current = regimes.current
        if current is None:
            return original(*args, position_ids=position_ids, **kwargs)
        if isinstance(current, int):
            output, parts = in_regime(current, position_ids, args, kwargs)
        else:
            current = current.to(position_ids.device)
            output, parts = in_regime(0, torch.where(current == 0, position_ids, 0), args, kwargs)
            for number in range(1, len(regimes.starts)):
                is_member = current == number
                _, later = in_regime(number, torch.where(is_member, position_ids, 0), args, kwargs)
                parts = tuple(
                    torch.where(is_member[..., None], new, old) for new, old in zip(later, parts, strict=True)
                )
        return parts[0] if isinstance(output, Tensor) else type(output)(parts)

    names = list(inspect.signature(original).parameters)

    def by_name(*args: Any, **kwargs: Any) -> Any:
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        return forward(**named)

    return by_name


class _Past(LengthlessCache):
    """A cache that holds `offset` tokens, as far as `prepare_inputs_for_generation` can see."""

    def __len__(self) -> int:
        return 1


def _rereads(model: PreTrainedModel, length: int) -> bool:
    """Whether `generate` reads the whole sequence when it has `length` tokens and keys and values of all but the
    last."""
    ids = torch.ones(1, length, dtype=torch.long, device=model.device)
    prepare: Callable[..., dict[str, Tensor]] = cast(Any, model).prepare_inputs_for_generation
    inputs = prepare(
        ids,
        next_sequence_length=1,
        **with_cache(model, _Past(length - 1)),
        attention_mask=torch.ones_like(ids),
        use_cache=True,
    )
    return inputs["input_ids"].shape[1] > 1
