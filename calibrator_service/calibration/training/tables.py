"""The table proposers: prompt look-up, the n-gram table, and their confidence trained on chains of drafts with known
outcomes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from calibrator_service.calibration.run import CalibrationRun
from calibrator_service.calibration.states.collect import LabelledSequence
from calibrator_service.calibration.states.training_data import TrainingData
from shared.ladder.confidence import Confidence
from shared.ladder.ladder import Ladder, ModelIdentity
from shared.ladder.proposers import NGRAM_TABLE, PROMPT_LOOKUP
from shared.ladder.table_confidence import Bins, bins_of, fit_table_confidence, lookup_bins
from shared.ladder.tables import SequenceTables, native_ladder

# Drafts of a chain.
MAX_CHAIN = 8


@dataclass(frozen=True)
class TableSample:
    """One draft of one table: `agreed` if it is the full model's choice."""

    table: str
    evidence: Bins
    agreed: bool


def labelled_positions(ladder: Ladder, sequence: LabelledSequence) -> Iterator[tuple[SequenceTables, int, int]]:
    """(tables that know the tokens up to the position, the position, the full model's choice after it), for each
    labelled one."""
    tokens, choices = sequence.tokens.tolist(), sequence.choices.tolist()
    tables = SequenceTables(native_ladder(ladder, ladder.model.vocabulary_size), Confidence())
    tables.append(tokens[: sequence.first])
    for position in range(sequence.first, len(tokens)):
        tables.append(tokens[position : position + 1])
        yield tables, position, choices[position]


def table_samples(ladder: Ladder, sequence: LabelledSequence) -> Iterator[TableSample]:
    """Yields every draft of the chains from every settled position.

    Position i is settled: tokens[: i + 1] are final. A chain continues while one of the drafts is the full model's
    choice and is also the sequence's next token, so that the context of each draft is the true one.
    """
    tokens, choices = sequence.tokens.tolist(), sequence.choices.tolist()
    for tables, settled, _ in labelled_positions(ladder, sequence):
        for chained in range(min(MAX_CHAIN, len(tokens) - settled)):
            position = settled + chained
            lookup, ngrams, _ = tables.matches(tokens[settled + 1 : position + 1])
            choice, is_drafted = choices[position], False
            if lookup is not None:
                agreed = lookup.token == choice
                is_drafted |= agreed
                yield TableSample(PROMPT_LOOKUP, lookup_bins(lookup, ngrams, chained), agreed)
            for match in ngrams:
                agreed = match.token == choice
                is_drafted |= agreed
                yield TableSample(NGRAM_TABLE, bins_of(match, lookup, chained), agreed)
            if not is_drafted or position + 1 >= len(tokens) or tokens[position + 1] != choice:
                break


def fit_tables(run: CalibrationRun, material: TrainingData) -> Ladder:
    """The ladder of the table proposers alone: the n-gram table of the heads split, and their confidence trained on the
    confidence split."""
    untrained = fit_table_confidence([], [])
    ladder = Ladder(
        ModelIdentity.of(run.loaded),
        lookup_confidence=untrained,
        ngrams=material.ngrams.build(run.plan.table_bytes),
        ngram_confidence=untrained,
    )
    evidence: dict[str, list[Bins]] = {PROMPT_LOOKUP: [], NGRAM_TABLE: []}
    agreed: dict[str, list[bool]] = {PROMPT_LOOKUP: [], NGRAM_TABLE: []}
    for sequence in material.table_sequences["confidence"]:
        for sample in table_samples(ladder, sequence):
            evidence[sample.table].append(sample.evidence)
            agreed[sample.table].append(sample.agreed)
    return replace(
        ladder,
        lookup_confidence=fit_table_confidence(evidence[PROMPT_LOOKUP], agreed[PROMPT_LOOKUP]),
        ngram_confidence=fit_table_confidence(evidence[NGRAM_TABLE], agreed[NGRAM_TABLE]),
    )
