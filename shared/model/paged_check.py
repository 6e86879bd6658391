"""Whether passes over pages give the states that the model's own attention gives: asked of every model before it is served so."""

from collections.abc import Callable

import torch
from torch import Tensor

from shared.errors import UnsupportedModel
from shared.model.cache import SlotCache
from shared.model.packed import Segment
from shared.model.runner import DepthRunner

# Positions that the check fills at most; windows that are longer are judged by their mask alone.
CHECK_SLOTS = 1024
LONGEST = 488
# Relative distance of a token's states, the median and the largest: what rounding elsewhere and sums in another order come to after
# all layers. In bfloat16 a layer compiled whole rounds so much less than its modules that single tokens differ by a seventh; a
# window one position off makes two fifths.
TOLERANCE = {
    torch.float32: (1e-4, 1e-3),
    torch.float16: (1e-2, 5e-2),
    torch.bfloat16: (6e-2, 2.5e-1),
}

NewCache = Callable[[int], SlotCache]
RunPacked = Callable[..., Tensor]


class Probe:
    """Three sequences of random tokens, one longer than the model's window, and their states as the model's own way has them."""

    @torch.inference_mode()
    def __init__(self, runner: DepthRunner) -> None:
        """`runner` runs `SlotCache`s the model's own way."""
        loaded = runner.loaded
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
            states = runner.run(ids, SlotCache(length), first=0, last=self._num_layers, base=0)
            self._ids.append(ids)
            expected.append(states[0, length // 2 :])
        self._expected = torch.cat(expected).float()

    @torch.inference_mode()
    def compare(self, run_packed: RunPacked, new_cache: NewCache, what: str) -> None:
        """Raises `UnsupportedModel` (reason PAGES_NOT_SUPPORTED) where `what` fails or gives other states.

        The passes are ragged, rolled back once, and split by depth.
        """
        try:
            states = self._states(run_packed, new_cache)
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

    def _states(self, run_packed: RunPacked, new_cache: NewCache) -> Tensor:
        """[T, D] of the second half of each sequence, in one pass with the others'."""
        last, middle = self._num_layers, self._num_layers // 2
        parts: list[Segment] = []
        later = []
        for ids in self._ids:
            length, held = ids.shape[1], ids.shape[1] // 2
            cache = new_cache(length)
            if held:
                run_packed(ids[:, :held], [Segment(cache, 0, held)], first=0, last=last)
            parts.append(Segment(cache, held, length - held))
            later.append(ids[:, held:])
        tokens = torch.cat(later, 1)
        run_packed(tokens.flip(1), parts, first=0, last=last)  # wrong ones, rolled back
        if not middle:
            return run_packed(tokens, parts, first=0, last=last)[0]
        hidden = run_packed(tokens, parts, first=0, last=middle)
        return run_packed(tokens, parts, first=middle, last=last, hidden=hidden)[0]


def _not_supported(why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"passes over pages do not work for this model: {why}", reason="PAGES_NOT_SUPPORTED"
    )
