"""What a constraint allows at each row of a trial, given as masks."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.model.sampling import Trial


class Masks:
    """`shared.model.sampling.AllowedTokens`. masks [n + 1, V]. `asked`: the rows whose masks were asked for."""

    def __init__(self, masks: npt.NDArray[np.bool_]) -> None:
        self._masks = masks
        self.asked: list[int] = []

    def forced(self, row: int) -> int | None:
        few = np.flatnonzero(self._masks[row])
        return int(few[0]) if len(few) == 1 else None

    def allows(self, row: int, token: int) -> bool:
        return bool(self._masks[row, token])

    def mask(self, row: int) -> npt.NDArray[np.bool_]:
        self.asked.append(row)
        return self._masks[row]


def drawn_masks(size: int, trials: Sequence[Trial], seed: int) -> list[Masks | None]:
    """One for most trials, with few tokens or many, and always with the drafts and the token 0."""
    draw = np.random.default_rng(seed)
    found: list[Masks | None] = []
    for trial in trials:
        masks = draw.random((trial.num_rows, size)) < draw.choice([0.0, 0.05, 0.5, 0.95])
        masks[range(len(trial.drafts)), list(trial.drafts)] = True
        masks[masks.sum(1) == 0, 0] = True
        found.append(Masks(masks) if draw.random() < 0.8 else None)
    return found
