"""The table rungs (suffix and successor): the successor table, and routers trained on chains of drafts with known outcomes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from calibrator_service.calibration.run import Run
from calibrator_service.calibration.states.collect import LabelledSequence
from calibrator_service.calibration.states.training_data import TrainingData
from shared.ladder.ladder import Ladder, ModelIdentity
from shared.ladder.risk import CERTIFIED_DRAFTS
from shared.ladder.table_proposer import TableProposer, successor_evidence, suffix_evidence
from shared.ladder.table_router import Evidence, fit_table_router

MAX_CHAIN = CERTIFIED_DRAFTS


@dataclass(frozen=True)
class TableSample:
    """One draft of one table: `agreed` if it is the full model's choice."""

    table: str
    evidence: Evidence
    agreed: bool


def table_samples(ladder: Ladder, sequence: LabelledSequence) -> Iterator[TableSample]:
    """Yields every draft of the chains from every settled position.

    Position i is settled: tokens[: i + 1] are final. A chain continues while one of the drafts is the full model's choice and is
    also the sequence's next token, so that the context of each draft is the true one.
    """
    tokens, choices = sequence.tokens.tolist(), sequence.choices.tolist()
    drafter = TableProposer(ladder, tokens[: sequence.first + 1])
    for settled in range(sequence.first, len(tokens)):
        if settled > sequence.first:
            drafter.append(tokens[settled : settled + 1])
        for chained in range(min(MAX_CHAIN, len(tokens) - settled)):
            position = settled + chained
            suffix, successors = drafter.matches(tokens[settled + 1 : position + 1])
            choice, is_drafted = choices[position], False
            if suffix is not None:
                agreed = suffix.token == choice
                is_drafted |= agreed
                yield TableSample("suffix", suffix_evidence(suffix, successors, chained), agreed)
            for match in successors:
                agreed = match.token == choice
                is_drafted |= agreed
                yield TableSample("successor", successor_evidence(match, suffix, chained), agreed)
            if not is_drafted or position + 1 >= len(tokens) or tokens[position + 1] != choice:
                break


def fit_tables(run: Run, material: TrainingData) -> Ladder:
    """The ladder of the table rungs alone: the successor table of the heads split, and routers trained on the routers split."""
    untrained = fit_table_router([], [])
    ladder = Ladder(
        ModelIdentity.of(run.loaded),
        suffix_router=untrained,
        successors=material.successors.build(run.plan.table_bytes),
        successor_router=untrained,
    )
    evidence: dict[str, list[Evidence]] = {"suffix": [], "successor": []}
    agreed: dict[str, list[bool]] = {"suffix": [], "successor": []}
    for sequence in material.table_sequences["routers"]:
        for sample in table_samples(ladder, sequence):
            evidence[sample.table].append(sample.evidence)
            agreed[sample.table].append(sample.agreed)
    return replace(
        ladder,
        suffix_router=fit_table_router(evidence["suffix"], agreed["suffix"]),
        successor_router=fit_table_router(evidence["successor"], agreed["successor"]),
    )
