"""The check that every model passes before it is run: does it matter how a text is cut into passes?

`generate` reads a prompt in one pass, an engine in pieces. They agree if what a token gets depends on the tokens before
it and on nothing else in the pass. Rotary angles that depend on the length are known (`shared.model.regimes`); what
else there may be shows here.
"""

import torch
from torch import Tensor

from shared.errors import UnsupportedModel
from shared.model.borders import NUM_CHECKED, origins
from shared.model.cache import refuse_if_out_of_memory
from shared.model.gated_model import GatedModel

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
def check_cuts(model: GatedModel) -> None:
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


def _states(model: GatedModel, ids: Tensor, place: int, cut: tuple[int, ...]) -> Tensor:
    """The states [T, D] of `ids` at positions from `place` on, as one prompt that is read in passes of these sizes."""
    cache = model.new_cache(ids.shape[1])
    cache.origin = place
    states, base = [], 0
    for part in ids.split(cut, 1) if sum(cut) == ids.shape[1] else ids.split(1, 1):
        states.append(
            model.run(part, cache, first=0, last=model.num_layers, base=base, read_length=place + ids.shape[1])
        )
        base += part.shape[1]
    return torch.cat(states, 1)[0]
