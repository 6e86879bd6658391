"""How what all proposers say of a position is combined, learned with every one of them asked."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, repeat

import torch

from calibrator_service.calibration.states.chunk import StateChunk
from calibrator_service.calibration.states.collect import LabelledSequence
from calibrator_service.calibration.training.chain_outputs import chain_outputs
from calibrator_service.calibration.training.draft_vocabulary import DraftVocabulary
from calibrator_service.calibration.training.logistic import fit_logistic
from calibrator_service.calibration.training.tables import labelled_positions
from shared.ladder.confidence import TABLE_ALONE, Confidence
from shared.ladder.confidence_head import scalar_features
from shared.ladder.exits import LayerExit
from shared.ladder.joint_weights import CASES, DEFAULT_WEIGHTS, MAX_WEIGHT, JointWeights
from shared.ladder.ladder import Ladder
from shared.ladder.proposers import Draft

# Positions that are learned from and measured on.
MAX_POSITIONS = 20_000
# Precision of the priors. A few hundred positions of a few texts say less than they do, a few thousand of them more
# (docs/decisions/012).
PRECISION = 500.0
# Log-odds are of probabilities no nearer to 0 and 1.
LEAST = 0.001
# Chains at a time.
PASS_SIZE = 1024

# What all proposers say of a position, and the full model's choice.
Position = tuple[list[Draft], int]


def joint_positions(
    ladder: Ladder, chunks: Sequence[StateChunk], sequences: Sequence[LabelledSequence], vocabulary: DraftVocabulary
) -> Iterator[Position]:
    """Up to MAX_POSITIONS positions of a split, with every proposer asked. `sequences`: those of the chunks, in
    the same order, or the first of them."""
    exits = _exit_drafts(ladder, chunks, vocabulary) if ladder.exits else repeat(())
    tables = (draft for sequence in sequences for draft in table_positions(ladder, sequence))
    known = (
        # An exit's numbers may overflow.
        ([draft for draft in (*drafts, *others) if draft.probability > 0.0], choice)
        for (drafts, choice), others in zip(tables, exits, strict=False)
        if others is not None
    )
    return islice(known, MAX_POSITIONS)


def table_positions(ladder: Ladder, sequence: LabelledSequence) -> Iterator[Position]:
    """What the tables say of the sequence's labelled positions."""
    for tables, _, choice in labelled_positions(ladder, sequence):
        yield tables.propose(), choice


def _exit_drafts(
    ladder: Ladder, chunks: Sequence[StateChunk], vocabulary: DraftVocabulary
) -> Iterator[tuple[Draft, ...] | None]:
    """The first drafts of the exits' chains from each labelled position of the chunks.
    None: nothing is settled before it."""
    for stored in chunks:
        chunk, layers = stored.to(vocabulary.device), ladder.model.num_layers
        by_exit = [_first_drafts(layer_exit, chunk, vocabulary, layers) for layer_exit in ladder.exits]
        drafts = zip(*by_exit, strict=True)
        yield from (next(drafts) if is_usable else None for is_usable in chunk.usable.tolist())


@torch.no_grad()
def _first_drafts(
    layer_exit: LayerExit, chunk: StateChunk, vocabulary: DraftVocabulary, num_layers: int
) -> Iterator[Draft]:
    device = layer_exit.confidence.slope.device
    for index in torch.arange(len(chunk)).split(PASS_SIZE):
        output = next(chain_outputs(layer_exit.depth, layer_exit.head, chunk, index, vocabulary, num_layers))
        scalars = scalar_features(output.logits, output.chain_places)
        probabilities = layer_exit.confidence(output.adapted.to(device), scalars.to(device)).tolist()
        tokens = vocabulary.tokens[output.logits.argmax(-1).cpu()].tolist()
        for token, probability in zip(tokens, probabilities, strict=True):
            yield Draft(token, probability, layer_exit.name, layer_exit.depth)


def log_odds(probability: float) -> float:
    probability = min(max(probability, LEAST), 1.0 - LEAST)
    return math.log(probability / (1.0 - probability))


def fit_joint(positions: Iterable[Position]) -> JointWeights:
    """The weights under which the drafts of `positions` are as often right as they say, case by case; the defaults are
    the prior."""
    samples: dict[str, list[tuple[float, float, float]]] = {case: [] for case in CASES}
    right: dict[str, list[bool]] = {case: [] for case in CASES}
    known = list(positions)
    confidence = Confidence(
        exit_names=sorted({draft.proposer for drafts, _ in known for draft in drafts if draft.is_exit})
    )
    for drafts, choice in known:
        for draft, case, other, _ in confidence.rate(drafts):
            if case != TABLE_ALONE:
                of_other = log_odds(other.probability) if other is not None else 0.0
                samples[case].append((1.0, log_odds(draft.probability), of_other))
                right[case].append(draft.token == choice)
    fitted = {}
    for case in CASES:
        features = torch.tensor(samples[case], dtype=torch.float64).reshape(-1, 3)
        weights = fit_logistic(features, torch.tensor(right[case]), DEFAULT_WEIGHTS.of(case), (PRECISION,) * 3)
        fitted[case] = [min(max(weight, -MAX_WEIGHT), MAX_WEIGHT) for weight in weights]
    return JointWeights.from_json(fitted)
