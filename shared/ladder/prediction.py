"""Predicted outputs (proposer `prediction`): drafts a text that the caller expects to get back, with edits."""

from collections.abc import Sequence

import numpy as np

from shared.ladder.proposers import PREDICTION, Draft

# Where the prediction was wrong, it goes on behind the nearest place with the last tokens of the answer: so many of
# them, at most so many tokens away. More of them prove more.
ALIGNMENTS = ((4, None), (2, 64), (1, 16))
MAX_TAIL = ALIGNMENTS[0][0]
# Odd, so that the keys of MAX_TAIL tokens seldom meet.
MIXER = 0x9E3779B97F4A7C15
# Right drafts of so many, before any is known, by the tokens in a row that were right: 0, 1, 2 to 3, 4 to 7, ...
PRIORS = (0.3, 0.6, 0.8, 0.9, 0.95, 0.97)
PRIOR_WEIGHT = 4.0
# An answer begins as the prediction does.
FIRST_RUN = 4


class PredictedText:
    """A prediction, and where it has each MAX_TAIL tokens in a row. It does not change, and making it takes as long as
    several steps if it is long, so make it in the caller's thread.

    Token ids are below 1,114,112, so that they are the characters of a text, which is searched as fast as memory is
    read.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self.text = "".join(map(chr, prediction))
        tokens = np.array(prediction, np.uint64)
        keys = np.zeros(max(len(tokens) - MAX_TAIL + 1, 0), np.uint64)
        for place in range(MAX_TAIL):
            keys = keys * np.uint64(MIXER) + tokens[place : place + len(keys)]
        # The first place comes first where keys are equal.
        self._places = np.argsort(keys, kind="stable")
        self._keys = keys[self._places]

    def nearest(self, tail: str, place: int) -> int | None:
        """The place behind an occurrence of MAX_TAIL tokens that is nearest to `place`."""
        key = 0
        for character in tail:
            key = (key * MIXER + ord(character)) % 2**64
        first, last = (np.searchsorted(self._keys, np.uint64(key), side) for side in ("left", "right"))
        starts = self._places[first:last]
        after = int(np.searchsorted(starts, place - MAX_TAIL))
        near = [int(start) + MAX_TAIL for start in starts[max(after - 1, 0) : after + 1]]
        # Other tokens may have the same key.
        ends = [end for end in reversed(near) if self.text[end - MAX_TAIL : end] == tail]
        return min(ends, key=lambda end: abs(end - place), default=None)


class PredictionProposer:
    """Proposes the token of a prediction at the place where the answer is in it. A `Proposer`.

    It knows nothing of the prompt: the first `num_prompt_tokens` that are appended are left out. `num_right`: tokens of
    the answer that the prediction had at that place.
    """

    def __init__(self, predicted: PredictedText, num_prompt_tokens: int) -> None:
        self.num_right = 0
        self._predicted, self._text = predicted, predicted.text
        self._num_left_out = num_prompt_tokens
        self._tail = ""
        # Where the prediction goes on, and how many tokens before that were right in a row.
        self._at = 0, FIRST_RUN
        # By the length of the run: drafts that were right, and all.
        self._counts = [[PRIOR_WEIGHT * prior, PRIOR_WEIGHT] for prior in PRIORS]

    @property
    def num_wrong(self) -> int:
        """Tokens of the prediction that the answer does not have."""
        return max(len(self._text) - self.num_right, 0)

    def append(self, tokens: Sequence[int]) -> None:
        """Appends final tokens to the sequence."""
        for token in tokens[self._num_left_out :]:
            place, run = self._at
            if place < len(self._text):
                is_right = self._text[place] == chr(token)
                self.num_right += is_right
                count = self._counts[_bin(run)]
                count[0] += is_right
                count[1] += 1.0
            self._tail, place, run = self._followed(self._tail, place, run, token)
            self._at = place, run
        self._num_left_out = max(self._num_left_out - len(tokens), 0)

    def propose(self, drafted: Sequence[int] = ()) -> list[Draft]:
        """As `Proposer.propose`: at most one draft."""
        tail, (place, run) = self._tail, self._at
        for token in drafted:
            tail, place, run = self._followed(tail, place, run, token)
        if place >= len(self._text):
            return []
        right, all_drafts = self._counts[_bin(run)]
        return [Draft(ord(self._text[place]), right / all_drafts, PREDICTION, 0)]

    def _followed(self, tail: str, place: int, run: int, token: int) -> tuple[str, int, int]:
        """The last tokens of the answer, the place and the run after one more token."""
        tail = (tail + chr(token))[-MAX_TAIL:]
        if self._text[place : place + 1] == tail[-1]:
            return tail, place + 1, run + 1
        for length, reach in ALIGNMENTS:
            nearest = self._nearest(tail[-length:], place, reach) if len(tail) >= length else None
            if nearest is not None:
                return tail, nearest, length
        # The first wrong token may stand in the place of one, further ones are between two.
        return tail, place + 1 if run else place, 0

    def _nearest(self, tokens: str, place: int, reach: int | None) -> int | None:
        """The place behind an occurrence of `tokens` that is nearest to `place`, at most `reach` away."""
        if reach is None:
            return self._predicted.nearest(tokens, place)
        size = len(tokens)
        ahead = self._text.find(tokens, max(place - size, 0), place + reach)
        behind = self._text.rfind(tokens, max(place - reach - size, 0), place)
        ends = [start + size for start in (ahead, behind) if start >= 0]
        return min(ends, key=lambda end: abs(end - place), default=None)


def _bin(run: int) -> int:
    return min(run.bit_length(), len(PRIORS) - 1)
