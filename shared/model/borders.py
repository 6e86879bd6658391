"""The positions at which the behaviour of a model may change, as its configuration names them.

A check that runs only the first few positions says nothing about later ones: rotary factors, attention scales, windows
and tables change at positions that a configuration names. Every check that compares two ways of running a model begins
at each of `origins`.

Which numbers are positions is not guessed. A number that is not known to count something else is taken for a position,
so a field that nobody has heard of costs one more pass of a few tokens.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig

# Tokens of a check at one place.
NUM_CHECKED = 9
# For configurations that state no limit.
DEFAULT_CONTEXT_LENGTH = 4096

# Fields that count something else than positions: sizes, numbers of parts, ids of tokens, scales of the angles.
_NO_POSITION = re.compile(
    r"(num|n)_.*(layers?|heads?|experts?|groups|tok|labels|embd|inner)"
    r"|.*_(ids?|dims?|rank|theta|factor|multiplier|layers|heads|experts)|.*vocab_size.*"
    r"|(hidden|intermediate|ffn|moe_intermediate|expert|embedding|head|shared_expert_intermediate)_size"
    r"|d_model|d_kv|d_ff|rope_base|mrope_section|beta_fast|beta_slow|long_mscale|short_mscale"
)


def context_limit(config: PretrainedConfig) -> int:
    """The number of positions that a configuration allows."""
    text_config = config.get_text_config(decoder=True)
    return getattr(text_config, "max_position_embeddings", None) or DEFAULT_CONTEXT_LENGTH


def borders(config: PretrainedConfig, context_length: int) -> tuple[int, ...]:
    """The positions in [NUM_CHECKED, context_length) at which behaviour may change, in ascending order."""
    text_config = config.get_text_config(decoder=True)
    numbers = set(_numbers(text_config.to_dict().items()))
    return tuple(sorted(n for n in numbers if NUM_CHECKED <= n < context_length))


def origins(config: PretrainedConfig, context_length: int, num_tokens: int = NUM_CHECKED) -> tuple[int, ...]:
    """Where checks over `num_tokens` tokens begin: at 0, so that they cross each border, and at the end of the
    context."""
    last = max(context_length - num_tokens, 0)
    places = [0]
    for border in (*borders(config, context_length), context_length):
        place = min(border - (num_tokens - 1) // 2, last)
        if place > places[-1]:
            places.append(place)
    return tuple(places)


def crossing_length(config: PretrainedConfig, context_length: int, most: int) -> int:
    """Tokens of a sequence that is longer than each border below `most`, such as a window; at least 24 if the context
    allows."""
    inside = [border for border in borders(config, context_length) if border < most]
    return min(max([24, *(border + NUM_CHECKED for border in inside)]), context_length)


def _numbers(fields: Iterable[tuple[object, Any]]) -> Iterator[int]:
    for name, value in fields:
        if isinstance(value, bool) or _NO_POSITION.fullmatch(str(name)):
            continue
        if isinstance(value, Mapping):
            yield from _numbers(value.items())
        elif isinstance(value, list | tuple):
            yield from _numbers((name, item) for item in value)
        elif isinstance(value, int | float) and value < 2**62:
            yield int(value)
