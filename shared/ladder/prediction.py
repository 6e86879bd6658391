"""Predicted outputs (proposer `prediction`): drafts a text that the caller expects to get back, with edits. See
csrc/draft/prediction.h."""

from collections.abc import Sequence

from shared.ops.drafting import Handle, tokens_of


class PredictedText:
    """A prediction, and where it has each four tokens in a row. It does not change, and making it takes as long as
    several steps if it is long, so make it in the caller's thread."""

    def __init__(self, prediction: Sequence[int]) -> None:
        pointer, count, _kept = tokens_of(prediction)
        self.num_tokens = len(prediction)
        self.handle = Handle("predicted", pointer, count, is_long=True)
