"""The check that every model passes before it runs over paged KV: are the states those of the model's own attention?"""

from collections.abc import Callable

import torch
from torch import Tensor

from shared.errors import UnsupportedModel
from shared.model.cache import KVCache
from shared.model.gated_model import GatedModel
from shared.model.ragged import RaggedSequence

# Largest number of tokens that the check keeps in caches. Of a longer window only the mask is checked.
CHECK_TOKENS = 1024
LONGEST = 488
# Largest relative distance between a token's states: the median and the maximum over all tokens. It comes from rounding at other places
# and from sums in another order, over all layers. In bfloat16 a layer compiled as a whole rounds so much less than its modules that
# single tokens differ by a seventh. A window that is one position off makes a difference of two fifths.
TOLERANCE = {
    torch.float32: (1e-4, 1e-3),
    torch.float16: (1e-2, 5e-2),
    torch.bfloat16: (6e-2, 2.5e-1),
}

NewCache = Callable[[int], KVCache]
RunRagged = Callable[..., Tensor]


class StateCheck:
    """Three sequences of random tokens, one longer than the model's window, and their states by the model's own attention."""

    @torch.inference_mode()
    def __init__(self, model: GatedModel) -> None:
        loaded = model.loaded
        generator = torch.Generator().manual_seed(0)
        config = loaded.model.config.get_text_config(decoder=True)
        window = getattr(config, "sliding_window", None) or 0
        longest = min(max(24, min(window, LONGEST - 8) + 8), loaded.context_length)
        self._num_layers = loaded.num_layers
        self._tolerance = TOLERANCE.get(loaded.model.dtype, TOLERANCE[torch.float32])
        self._ids: list[Tensor] = []
        expected = []
        for length in (longest, min(3, longest), longest // 2):
            ids = torch.randint(loaded.vocabulary_size, (1, length), generator=generator)
            ids = ids.to(loaded.device)
            cache = model.new_cache(length)
            states = model.run(ids, cache, first=0, last=self._num_layers, base=0)
            self._ids.append(ids)
            expected.append(states[0, length // 2 :])
        self._expected = torch.cat(expected).float()

    @torch.inference_mode()
    def compare(self, run_ragged: RunRagged, new_cache: NewCache, what: str) -> None:
        """Raises `UnsupportedModel` (reason PAGES_NOT_SUPPORTED) if passes of `run_ragged` fail or give other states.

        The passes are ragged, rolled back once, and split by depth. `what` names the tested feature in the error.
        """
        try:
            states = self._states(run_ragged, new_cache)
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            RuntimeError,
        ) as error:
            raise _not_supported(f"{what}: {type(error).__name__}: {error}") from error
        distance = (states.float() - self._expected).norm(dim=-1)
        relative = distance / self._expected.norm(dim=-1).clamp_min(1e-9)
        usual, worst = float(relative.median()), float(relative.max())
        if not (usual <= self._tolerance[0] and worst <= self._tolerance[1]):
            raise _not_supported(
                f"{what}: states differ by {usual:.1e} from the model's own, a token's by {worst:.1e}"
            )

    def _states(self, run_ragged: RunRagged, new_cache: NewCache) -> Tensor:
        """The states [T, D] of the second half of each sequence, in one ragged batch."""
        last, middle = self._num_layers, self._num_layers // 2
        sequences: list[RaggedSequence] = []
        later = []
        for ids in self._ids:
            length, held = ids.shape[1], ids.shape[1] // 2
            cache = new_cache(length)
            if held:
                run_ragged(ids[:, :held], [RaggedSequence(cache, 0, held)], first=0, last=last)
            sequences.append(RaggedSequence(cache, held, length - held))
            later.append(ids[:, held:])
        tokens = torch.cat(later, 1)
        run_ragged(
            tokens.flip(1), sequences, first=0, last=last
        )  # wrong tokens; the next pass rolls them back
        if not middle:
            return run_ragged(tokens, sequences, first=0, last=last)[0]
        hidden = run_ragged(tokens, sequences, first=0, last=middle)
        return run_ragged(tokens, sequences, first=middle, last=last, hidden=hidden)[0]


def _not_supported(why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"paged KV does not work for this model: {why}", reason="PAGES_NOT_SUPPORTED"
    )
