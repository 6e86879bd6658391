"""The ladder of a model for which no router is published: the proposers that need no text of the model."""

from shared.ladder.ladder import Ladder, ModelIdentity
from shared.ladder.table_confidence import TableConfidence
from shared.model.loaded import LoadedModel

# Those of SmolLM2-135M's shipped router, from 71,644 positions. What serving finds corrects them.
_LOOKUP = TableConfidence(
    -2.47,
    (
        (0.0, 1.07, 1.53, 1.76, 2.06, 2.55, 2.55, 3.25),
        (0.0, 0.75, 1.30, 1.33, 1.36, 2.38, 2.48, 2.60),
        (0.0, 0.01, 0.01, 0.02, 0.05, 0.92, 1.22, 1.55),
        (0.0, -0.08, -0.12, -0.15, -0.16),
        (0.0, -0.61, 1.44),
    ),
)
# The confidence of the n-gram table, which the table that learns from answers drafts with.
_NGRAMS = TableConfidence(
    -3.10,
    (
        (0.0, 0.39, 0.42, 0.46, 0.58, 0.69, 0.82, 0.94),
        (0.0, 0.67, 0.83, 1.09, 1.20, 1.22, 1.39, 1.59),
        (0.0, 0.85, 1.25, 1.76, 2.30, 3.29, 3.34, 3.34),
        (0.0, 0.11, 0.13, 0.13, 0.13),
        (0.0, -1.60, 2.39),
    ),
)


def untrained_ladder(loaded: LoadedModel) -> Ladder:
    """Prompt look-up, and the confidence of the table that learns from answers. What a sequence has beside it
    (predictions, grammars, that table itself) is no part of a ladder."""
    sizes = loaded.num_layers, loaded.hidden_size, loaded.vocabulary_size
    model = ModelIdentity(loaded.model_id, "", loaded.architecture, *sizes)
    return Ladder(model, lookup_confidence=_LOOKUP, ngram_confidence=_NGRAMS, is_trained=False)
