"""How often a text has each token: kept beside it while it grows, so that no step counts a long text anew."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.model.sampling import SamplingParams

Counts = npt.NDArray[np.float32]


class ContextCounts:
    """What the penalties of one request count: `whole` [V], of prompt and answer, and `answer` [V]. None where no
    penalty counts it."""

    def __init__(
        self, sampling: SamplingParams, context: Sequence[int], num_prompt_tokens: int, vocabulary_size: int
    ) -> None:
        self.whole: Counts | None = None
        self.answer: Counts | None = None
        if sampling.repetition_penalty != 1.0:
            self.whole = _counted(context, vocabulary_size)
        if sampling.presence_penalty or sampling.frequency_penalty:
            self.answer = _counted(context[num_prompt_tokens:], vocabulary_size)

    def append(self, token: int) -> None:
        """A token of the answer."""
        for counts in (self.whole, self.answer):
            if counts is not None:
                counts[token] += 1.0


def _counted(tokens: Sequence[int], vocabulary_size: int) -> Counts:
    return np.bincount(np.array(tokens, np.int64), minlength=vocabulary_size).astype(np.float32)


def before_rows(counts: Counts, drafts: Sequence[int]) -> tuple[npt.NDArray[np.int64], Counts]:
    """The tokens [m] of a counted text and of the drafts after it, and how often each stands before each row [n, m]: a
    draft stands before the rows after its own."""
    occurs = counts > 0
    occurs[[*drafts]] = True
    tokens = np.flatnonzero(occurs)
    rows = np.tile(counts[tokens], (len(drafts) + 1, 1))
    for place, token in enumerate(drafts, start=1):
        rows[place:, np.searchsorted(tokens, token)] += 1.0
    return tokens, rows
