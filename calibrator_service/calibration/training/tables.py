"""Rung 0 judged as it is used: chained drafts over sequences whose every choice is known."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from calibrator_service.calibration.states.collect import LabelledSequence
from shared.ladder.ladder import Ladder, SequenceDrafter, successor_evidence, suffix_evidence
from shared.ladder.table_router import Evidence, TableRouter, fit_table_router

MAX_CHAIN = 8


@dataclass(frozen=True)
class TableSample:
    """One draft of one source: `agreed` if the full model's choice was it. `chained` 0 marks the first of a chain."""

    source: str
    evidence: Evidence
    agreed: bool


def table_samples(ladder: Ladder, sequence: LabelledSequence) -> Iterator[TableSample]:
    """Every draft that a chain from every settled position would make, while some source is right.

    Position i is settled: tokens[: i + 1] are final. A chain goes on while the token drafted is the full model's choice and the
    text went on with it, so its context is always the true one.
    """
    tokens, choices = sequence.tokens.tolist(), sequence.choices.tolist()
    drafter = SequenceDrafter(ladder, tokens[: sequence.first + 1])
    for settled in range(sequence.first, len(tokens)):
        if settled > sequence.first:
            drafter.append(tokens[settled : settled + 1])
        for chained in range(min(MAX_CHAIN, len(tokens) - settled)):
            at = settled + chained
            suffix, successors = drafter.table_matches(tokens[settled + 1 : at + 1])
            choice, hit = choices[at], False
            if suffix is not None:
                agreed = suffix.token == choice
                hit |= agreed
                yield TableSample("suffix", suffix_evidence(suffix, successors, chained), agreed)
            for match in successors:
                agreed = match.token == choice
                hit |= agreed
                yield TableSample("successor", successor_evidence(match, suffix, chained), agreed)
            if not hit or at + 1 >= len(tokens) or tokens[at + 1] != choice:
                break


def fit_table_routers(
    ladder: Ladder, sequences: Sequence[LabelledSequence]
) -> tuple[TableRouter, TableRouter]:
    """(suffix router, successor router) from the routers split. `ladder` needs blank routers, so that both sources speak."""
    evidence: dict[str, list[Evidence]] = {"suffix": [], "successor": []}
    agreed: dict[str, list[bool]] = {"suffix": [], "successor": []}
    for sequence in sequences:
        for sample in table_samples(ladder, sequence):
            evidence[sample.source].append(sample.evidence)
            agreed[sample.source].append(sample.agreed)
    return (
        fit_table_router(evidence["suffix"], agreed["suffix"]),
        fit_table_router(evidence["successor"], agreed["successor"]),
    )
