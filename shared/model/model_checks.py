"""The checks that every model passes before it is run: does it matter how a text is cut into passes? And before it
runs over paged KV: are the states those of the model's own attention?

`generate` reads a prompt in one pass, an engine in pieces. They agree if what a token gets depends on the tokens before
it and on nothing else in the pass. Rotary angles that depend on the length are known (`shared.model.regimes`); what
else there may be shows here.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shared.errors import UnsupportedModel
from shared.model.borders import NUM_CHECKED, crossing_length, origins
from shared.model.cache import KVCache, refuse_if_out_of_memory
from shared.model.paged_kv import BLOCK_TOKENS, num_blocks_of
from shared.model.ragged import RaggedSequence

if TYPE_CHECKING:
    from shared.model.contiguous_runner import GatedModel

# The first two end just before a border.
PIECES = (3, 1, 1, 4)
assert sum(PIECES) == NUM_CHECKED
# Largest relative distance between a token's states: the median and the maximum over all tokens. It comes from rounding
# at other places and from sums in another order, over all layers. In bfloat16 a layer compiled as a whole rounds so
# much less than its modules that single tokens differ by a seventh. A window that is one position off makes a
# difference of two fifths.
TOLERANCE = {torch.float32: (1e-4, 1e-3), torch.float16: (1e-2, 5e-2), torch.bfloat16: (6e-2, 2.5e-1)}


def difference(states: Tensor, expected: Tensor, dtype: torch.dtype) -> str:
    """How much states [T, D] differ from the expected ones; empty if it is no more than rounding explains in a model of
    `dtype`."""
    distance = (states.float() - expected.float()).norm(dim=-1)
    relative = distance / expected.float().norm(dim=-1).clamp_min(1e-9)
    usual, worst = float(relative.median()), float(relative.max())
    limits = TOLERANCE.get(dtype, TOLERANCE[torch.float32])
    if usual <= limits[0] and worst <= limits[1]:
        return ""
    return f"states differ by {usual:.1e} from the model's own, a token's by {worst:.1e}"


@torch.inference_mode()
def check_cuts(model: "GatedModel") -> None:
    """Raises `UnsupportedModel` (reason LENGTH_NOT_SUPPORTED) if a text beyond some border gets other states when it is
    read in pieces."""
    loaded = model.loaded
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(loaded.vocabulary_size, (1, NUM_CHECKED), generator=generator)
    ids = ids[:, : loaded.context_length].to(loaded.device)
    for place in origins(loaded.model.config, loaded.context_length):
        try:
            whole, pieces = (_states(model, ids, place, cut) for cut in ((NUM_CHECKED,), PIECES))
        except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
            refuse_if_out_of_memory(error)
            if not place:
                raise
            continue  # the model makes something as long as the text, such as ALiBi's biases, and cannot begin late
        if why := difference(pieces, whole, loaded.model.dtype):
            raise UnsupportedModel(
                f"{loaded.architecture} gives other states when a text is read in pieces, at positions from {place} "
                f"on: {why}; with a context of {place} tokens it can be run",
                reason="LENGTH_NOT_SUPPORTED",
            )


def _states(model: "GatedModel", ids: Tensor, place: int, cut: tuple[int, ...]) -> Tensor:
    """The states [T, D] of `ids` at positions from `place` on, as one prompt that is read in passes of these sizes."""
    cache = model.new_cache(ids.shape[1])
    cache.origin = place
    states, base = [], 0
    for part in ids.split(cut, 1) if sum(cut) == ids.shape[1] else ids.split(1, 1):
        states.append(
            model.run(part, cache, first=0, last=model.tried_depth, base=base, read_length=place + ids.shape[1])
        )
        base += part.shape[1]
    return torch.cat(states, 1)[0]


# Largest number of tokens that the check keeps in caches. Only the mask of a longer window is checked.
CHECK_TOKENS = 1024
LONGEST_BORDER = 480

NewCache = Callable[[int], KVCache]
RunRagged = Callable[..., Tensor]


class StateCheck:
    """Sequences of random tokens, and their states by the model's own attention: three from position 0 on, one longer
    than the model's window, and one across each border."""

    @torch.inference_mode()
    def __init__(self, model: "GatedModel") -> None:
        loaded = model.loaded
        generator = torch.Generator().manual_seed(0)
        config, context_length = loaded.model.config, loaded.context_length
        longest = crossing_length(config, context_length, LONGEST_BORDER)
        late = [(NUM_CHECKED, place) for place in origins(config, context_length) if place]
        self._num_layers = loaded.num_layers
        self._dtype = loaded.model.dtype
        self._ids: list[tuple[Tensor, int]] = []  # and the position of the first token
        expected = []
        for length, place in ((longest, 0), (min(3, longest), 0), (longest // 2, 0), *late):
            ids = torch.randint(loaded.vocabulary_size, (1, length), generator=generator)
            ids = ids.to(loaded.device)
            cache = model.new_cache(length)
            cache.origin = place
            try:
                states = model.run(ids, cache, first=0, last=self._num_layers, base=0)
            except (LookupError, TypeError, ValueError, RuntimeError) as error:
                raise _not_supported(
                    f"paged attention cannot be compared at positions from {place} on: {error}"
                ) from error
            self._ids.append((ids, place))
            expected.append(states[0, length // 2 :])
        self._expected = torch.cat(expected)

    @property
    def num_tokens(self) -> int:
        """Positions of the blocks that the check needs."""
        return sum(num_blocks_of(ids.shape[1]) for ids, _ in self._ids) * BLOCK_TOKENS

    @torch.inference_mode()
    def compare(self, run_ragged: RunRagged, new_cache: NewCache, what: str) -> None:
        """Raises `UnsupportedModel` (reason PAGES_NOT_SUPPORTED) if passes of `run_ragged` fail or give other states.

        The passes are ragged, rolled back once, and split by depth. `what` names the tested feature in the error.
        """
        try:
            states = self._states(run_ragged, new_cache)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise _not_supported(f"{what}: {type(error).__name__}: {error}") from error
        if why := difference(states, self._expected, self._dtype):
            raise _not_supported(f"{what}: {why}")

    def _states(self, run_ragged: RunRagged, new_cache: NewCache) -> Tensor:
        """The states [T, D] of the second half of each sequence, in one ragged batch."""
        last, middle = self._num_layers, self._num_layers // 2
        sequences: list[RaggedSequence] = []
        later = []
        for ids, place in self._ids:
            length, held = ids.shape[1], ids.shape[1] // 2
            cache = new_cache(length)
            cache.origin = place
            whole = RaggedSequence(cache, 0, held, read_length=place + length)
            if held:
                run_ragged(ids[:, :held], [whole], first=0, last=last)
            sequences.append(replace(whole, base=held, num_tokens=length - held))
            later.append(ids[:, held:])
        tokens = torch.cat(later, 1)
        run_ragged(tokens.flip(1), sequences, first=0, last=last)  # wrong tokens; the next pass rolls them back
        if not middle:
            return run_ragged(tokens, sequences, first=0, last=last)[0]
        hidden = run_ragged(tokens, sequences, first=0, last=middle)
        return run_ragged(tokens, sequences, first=middle, last=last, hidden=hidden)[0]


def _not_supported(why: str) -> UnsupportedModel:
    return UnsupportedModel(f"paged KV does not work for this model: {why}", reason="PAGES_NOT_SUPPORTED")
