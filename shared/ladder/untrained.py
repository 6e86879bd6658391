"""The ladder of a model for which no router is published: the proposers that need no text of the model."""

from shared.ladder.ladder import Ladder, ModelIdentity
from shared.ladder.table_confidence import TableConfidence
from shared.model.loaded import LoadedModel

# Those of SmolLM2-135M's shipped router, from 71,644 positions. What serving finds corrects them.
_BIAS = -2.47
_LENGTH = (0.0, 1.07, 1.53, 1.76, 2.06, 2.55, 2.55, 3.25)
_COUNT = (0.0, 0.75, 1.30, 1.33, 1.36, 2.38, 2.48, 2.60)
_SHARE = (0.0, 0.01, 0.01, 0.02, 0.05, 0.92, 1.22, 1.55)
_CHAINED = (0.0, -0.08, -0.12, -0.15, -0.16)
_SECOND_OPINION = (0.0, -0.61, 1.44)


def untrained_ladder(loaded: LoadedModel) -> Ladder:
    """Prompt look-up alone. What a sequence has beside it (predictions, grammars, the table that learns from answers)
    is no part of a ladder."""
    weights = (_LENGTH, _COUNT, _SHARE, _CHAINED, _SECOND_OPINION)
    return Ladder(ModelIdentity.of(loaded), lookup_confidence=TableConfidence(_BIAS, weights))
