"""The tokens that layer exits may propose, with the LM head's rows for them."""

from dataclasses import dataclass

from torch import Tensor

from calibrator_service.calibration.training.heads import vocabulary_lookup
from shared.ladder.head_rows import gather_rows
from shared.model.load import LoadedModel


@dataclass(frozen=True)
class DraftVocabulary:
    """tokens [Vd] int64, ascending; rows [Vd, head_width] and bias [Vd] of the frozen head; lookup [V]: token -> index or -1."""

    tokens: Tensor
    rows: Tensor
    bias: Tensor | None
    lookup: Tensor

    @classmethod
    def of(cls, loaded: LoadedModel, tokens: Tensor) -> "DraftVocabulary":
        rows, bias = gather_rows(loaded.parts.head, tokens)
        return cls(tokens, rows, bias, vocabulary_lookup(tokens, loaded.vocabulary_size))
