"""The draft vocabulary: the tokens that layer exits may propose, with the LM head's rows for them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from calibrator_service.calibration.run import CalibrationRun
from calibrator_service.calibration.states.training_data import TrainingData
from shared.ladder.head_rows import Matmul, gather_rows
from shared.model.loaded import LoadedModel


@dataclass(frozen=True)
class DraftVocabulary:
    """tokens [Vd] int64, ascending; rows [Vd, head_width] and bias [Vd] of the frozen head; lookup [V]: token -> index
    or -1."""

    tokens: Tensor
    rows: Tensor
    bias: Tensor | None
    lookup: Tensor

    @classmethod
    def of(cls, loaded: LoadedModel, tokens: Tensor) -> "DraftVocabulary":
        """The vocabulary of `tokens`, [Vd] int64, ascending."""
        rows, bias = gather_rows(loaded.parts.head, tokens)
        lookup = torch.full((loaded.vocabulary_size,), -1, dtype=torch.long)
        lookup[tokens] = torch.arange(len(tokens))
        return cls(tokens, rows, bias, lookup)

    @property
    def device(self) -> torch.device:
        """Where heads are trained and run: the device of the LM head's rows."""
        return self.rows.device

    @cached_property
    def project(self) -> Callable[[Tensor], Tensor]:
        """Maps an exit's adapted state [..., head_width] to logits [..., Vd], as it is served."""
        return Matmul(self.rows, self.bias)


def choose_draft_vocabulary(run: CalibrationRun, material: TrainingData) -> DraftVocabulary:
    """The tokens that the full model chose most often in the heads split, and then those of the lowest ids.

    Most tokenizers number their tokens by how frequent they are.
    Text of another kind than the heads split's has many that it lacks.
    """
    order = torch.argsort(material.choice_counts, descending=True, stable=True)
    chosen = order[: run.plan.draft_vocabulary_size].sort().values
    return DraftVocabulary.of(run.loaded, run.ranks.firsts(chosen))
