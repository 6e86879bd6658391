"""Native tables without a model, and the probability that they give a match, written for reading."""

import math
from collections.abc import Sequence
from typing import Any

from shared.ladder.confidence import Confidence
from shared.ladder.ladder import Ladder, ModelIdentity
from shared.ladder.ngram_table import NgramTable
from shared.ladder.table_confidence import SIZES, Bins, TableConfidence
from shared.ladder.tables import SequenceTables, native_ladder

VOCABULARY_SIZE = 1 << 20
NOBODY = ModelIdentity("nobody", "", "", 1, 1, VOCABULARY_SIZE)
FLAT = TableConfidence(0.0, [[0.0] * size for size in SIZES])


def tables_of(
    tokens: Sequence[int],
    lookup: TableConfidence | None = FLAT,
    ngrams: NgramTable | None = None,
    confidence: TableConfidence | None = None,
    **options: Any,
) -> SequenceTables:
    """Tables that know `tokens`."""
    confidence = confidence or (FLAT if ngrams or "learned" in options else None)
    ladder = Ladder(NOBODY, lookup, ngrams, confidence)
    tables = SequenceTables(native_ladder(ladder, VOCABULARY_SIZE), Confidence(), **options)
    tables.append(tokens)
    return tables


def probability_of(confidence: TableConfidence, bins: Bins) -> float:
    score = sum((row[b] for row, b in zip(confidence.weights, bins, strict=True)), confidence.bias)
    return min(max(1 / (1 + math.exp(-score)), 1e-3), 0.999)
