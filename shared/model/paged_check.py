"""The check that every model passes before it runs over paged KV: are the states those of the model's own attention?"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from shared.errors import UnsupportedModel
from shared.model.borders import NUM_CHECKED, crossing_length, origins
from shared.model.cache import KVCache
from shared.model.cut_check import difference
from shared.model.gated_model import GatedModel
from shared.model.paged_kv import BLOCK_TOKENS, num_blocks_of
from shared.model.ragged import RaggedSequence

# Largest number of tokens that the check keeps in caches. Only the mask of a longer window is checked.
CHECK_TOKENS = 1024
LONGEST_BORDER = 480

NewCache = Callable[[int], KVCache]
RunRagged = Callable[..., Tensor]


class StateCheck:
    """Sequences of random tokens, and their states by the model's own attention: three from position 0 on, one longer
    than the model's window, and one across each border."""

    @torch.inference_mode()
    def __init__(self, model: GatedModel) -> None:
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
