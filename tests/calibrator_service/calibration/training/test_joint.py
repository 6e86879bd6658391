"""What a calibration learns of all that proposers say of one position, and how it is measured."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from calibrator_service.calibration import pipeline
from calibrator_service.calibration.report.held_out import chain_agreement, joint_figures, tables_are_right
from calibrator_service.calibration.states.collect import Collector
from calibrator_service.calibration.text.shards import TokenSequence
from calibrator_service.calibration.training.draft_vocabulary import DraftVocabulary
from calibrator_service.calibration.training.joint import Position, fit_joint, joint_positions, log_odds
from shared.ladder.confidence import Confidence
from shared.ladder.joint_weights import CASES, DEFAULT_WEIGHTS, MAX_WEIGHT, JointWeights, Weights
from shared.ladder.ladder import Ladder, ModelIdentity
from shared.ladder.proposers import PROMPT_LOOKUP, Draft, exit_name
from shared.ladder.table_confidence import SIZES, TableConfidence
from shared.ladder.tables import SequenceTables, native_ladder
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.runner import captured_depths
from shared.ops.chains import ChainStart
from tests.random_ladder import random_ladder
from tests.tiers import tiered

EXIT = exit_name(0)
TRUTH = JointWeights(
    agree=(0.2, 0.3, 0.9),
    table_differs=(-1.2, 0.6, -0.5),
    exit_differs=(-0.8, 0.4, -0.1),
    exit_alone=(-0.3, 1.2, 0.0),
)


def table(token: int, probability: float) -> Draft:
    return Draft(token, probability, PROMPT_LOOKUP, 0)


def exit_draft(token: int, probability: float) -> Draft:
    return Draft(token, probability, EXIT, 0)


def positions(count: int, truth: JointWeights = TRUTH, seed: int = 0) -> Iterator[Position]:
    """Positions of every case, at which tokens are right as often as `truth` says."""
    draw = random.Random(seed)
    said = Confidence(truth, (EXIT,))
    for _ in range(count):
        first, second = (draw.uniform(0.02, 0.98) for _ in range(2))
        for drafts in (
            [table(7, first), exit_draft(7, second)],
            [table(7, first), exit_draft(8, second)],
            [exit_draft(8, second)],
        ):
            left, choice = draw.random(), 0
            for draft, _, _, probability in said.rate(drafts):
                if 0 <= left < probability:
                    choice = draft.token
                left -= probability
            yield drafts, choice


@pytest.mark.full
def test_the_weights_of_every_case_are_found() -> None:
    found = fit_joint(list(positions(8000)) * 6)
    for case in CASES:
        away = math.dist(DEFAULT_WEIGHTS.of(case), TRUTH.of(case))
        assert math.dist(found.of(case), TRUTH.of(case)) < 0.2 * away, case


def test_few_positions_change_little_and_none_change_nothing() -> None:
    def moved(found: JointWeights, case: str) -> float:
        return math.dist(found.of(case), DEFAULT_WEIGHTS.of(case))

    few = fit_joint(positions(60))
    for case in CASES:
        assert 0 < moved(few, case) < 0.1 * moved(TRUTH, case), case
    assert fit_joint([]) == DEFAULT_WEIGHTS
    alone = fit_joint([([table(7, 0.5)], 7), ([], 3)])
    assert alone == DEFAULT_WEIGHTS, "tables alone are believed"


@pytest.mark.parametrize("probability", tiered([1e-9, 0.5, 1.0], {1e-9}))
def test_drafts_that_are_always_right_or_wrong_give_finite_weights(probability: float) -> None:
    drafts = [table(7, probability), exit_draft(8, 1 - probability)]
    found = fit_joint([(drafts, 8)] * 30_000)
    for case in CASES:
        assert all(abs(weight) <= MAX_WEIGHT for weight in found.of(case))
    rated = {draft.token: p for draft, _, _, p in Confidence(found, (EXIT,)).rate(drafts)}
    assert rated[8] > 0.9 > 0.1 > rated[7]


def expected(weights: Weights, own: float, other: float) -> float:
    odds = weights[0] + weights[1] * log_odds(own) + weights[2] * log_odds(other)
    return 1 / (1 + math.exp(-odds))


def test_figures_of_a_hand_made_case() -> None:
    made = [
        ([table(7, 0.9), exit_draft(7, 0.6)], 7),
        ([table(7, 0.4), exit_draft(7, 0.2)], 3),
        ([table(7, 0.8), exit_draft(8, 0.3)], 8),
        ([exit_draft(8, 0.7)], 8),
        ([table(7, 0.6)], 7),
        ([], 5),
    ]
    found = joint_figures(TRUTH, made)
    agree = [expected(TRUTH.agree, 0.9, 0.6), expected(TRUTH.agree, 0.4, 0.2)]
    differ, alone = expected(TRUTH.table_differs, 0.8, 0.3), expected(TRUTH.exit_alone, 0.7, 0.5)
    assert found["agree"] == pytest.approx(
        {
            "positions": 2,
            "agreement": 0.5,
            "brier": ((1 - agree[0]) ** 2 + agree[1] ** 2) / 2,
            "brier_alone": (0.1**2 + 0.4**2) / 2,
        }
    )
    assert found["differ"] == pytest.approx(
        {"positions": 1, "agreement": 0.0, "brier": differ**2, "brier_alone": 0.8**2}
    )
    assert found["tables_unsure"] == pytest.approx(
        {
            "positions": 2,
            "agreement": 0.5,
            "brier": (agree[1] ** 2 + (1 - alone) ** 2) / 2,
            "brier_alone": (0.4**2 + 0.3**2) / 2,
        }
    )
    empty = {name: {"positions": 0} for name in ("tables_unsure", "agree", "differ")}
    assert joint_figures(TRUTH, []) == empty, "nothing is claimed without positions"


def test_learned_weights_predict_better_than_the_defaults_where_proposers_differ() -> None:
    unseen = list(positions(3000, seed=1))
    learned = joint_figures(fit_joint(positions(5000)), unseen)
    before = joint_figures(DEFAULT_WEIGHTS, unseen)
    for name in ("tables_unsure", "differ"):
        assert learned[name]["brier"] < before[name]["brier"] - 0.005
        assert learned[name]["brier"] < learned[name]["brier_alone"] - 0.02


def test_every_proposer_is_asked_at_each_position_as_it_is_served(counting, tmp_path) -> None:
    confidence = TableConfidence(0.25, [[0.1] * size for size in SIZES])
    ladder = replace(random_ladder(counting, 1), lookup_confidence=confidence)
    runner = ContiguousRunner(counting)
    kept = captured_depths(runner.num_layers)
    answers = []
    for prompt in ([0, 7, 9], [0, *range(5, 12)]):
        output = counting.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20, pad_token_id=1)
        answers.append(TokenSequence(tuple(output[0].tolist()), len(prompt)))
    # Nothing is settled before the first token of given text. So it is left out, and what follows stays in step.
    text = TokenSequence(tuple(range(5, 15)), 10)
    sequences = [answers[0], text, answers[1]]
    collector = Collector(runner, [0, 2, *kept], tmp_path, max_state_bytes=1 << 20)
    for sequence in sequences:
        collector.add("confidence", sequence)
    labelled = collector.finish("confidence")
    assert ladder.draft_vocabulary is not None
    vocabulary = DraftVocabulary.of(counting, ladder.draft_vocabulary)
    found = list(joint_positions(ladder, collector.chunks("confidence"), labelled, vocabulary))

    bound, wanted = ladder.bind(runner), []
    for sequence in labelled:
        tokens = sequence.tokens.tolist()
        captured = runner.capture(torch.tensor([tokens]), [0, 2, *kept, runner.num_layers])
        for settled in range(max(sequence.first, 1), len(tokens)):
            begin = torch.stack([captured[d][0, settled - 1] for d in (*kept, runner.num_layers)])
            tables = SequenceTables(native_ladder(ladder, ladder.model.vocabulary_size), Confidence())
            tables.append(tokens[: settled + 1])
            drafts = tables.propose()
            for index, depth in enumerate(ladder.exits):
                entering = captured[depth.depth][0, settled : settled + 1]
                start = ChainStart(tokens[settled : settled + 1], 0, 1, 1.0, 1.0, 0.0, entering)
                one = bound.propose(index, [start._replace(begin=begin)])
                drafts.append(Draft(int(one.tokens), float(one.probabilities[0, 0]), bound.names[index], depth.depth))
            wanted.append((drafts, int(sequence.choices[settled])))
    assert len(found) == len(wanted) > 40
    num_alike = 0
    for (said, choice), (served, chosen) in zip(found, wanted, strict=True):
        assert choice == chosen
        assert [draft.proposer for draft in said] == [draft.proposer for draft in served]
        for one, other in zip(said, served, strict=True):
            # A CPU serves exits in another number format than they are calibrated in.
            assert one.probability == pytest.approx(other.probability, abs=0.1)
            num_alike += one.token == other.token
    assert num_alike > 0.95 * sum(len(said) for said, _ in found)

    # The figures along chains put exits and tables of the same positions side by side, too.
    heads = {layer_exit.depth: layer_exit.head for layer_exit in ladder.exits}
    helped, layers = tables_are_right(ladder, labelled), ladder.model.num_layers
    figures = chain_agreement(helped, heads, collector.chunks("confidence"), vocabulary, layers)
    for layer_exit in ladder.exits:
        beside = [
            next(d for d in said if d.proposer == layer_exit.name).token == choice
            for said, choice in found
            if not any(d.proposer == PROMPT_LOOKUP and d.token == choice for d in said)
        ]
        own = figures[layer_exit.depth]
        assert own["positions_beside_tables"] == len(beside) > 0
        assert own["agreement_1_beside_tables"] == pytest.approx(sum(beside) / len(beside))


def test_weights_are_measured_on_text_that_they_were_not_learned_from(monkeypatch) -> None:
    said = {"confidence": list(positions(200)), "report": list(positions(100, seed=1))}
    monkeypatch.setattr(pipeline, "joint_positions", lambda ladder, chunks, sequences, vocabulary: said[chunks])
    splits = {split: split for split in said}
    material = SimpleNamespace(chunks=splits, table_sequences=splits)
    model = ModelIdentity("tiny", "sha256:0", "LlamaForCausalLM", 4, 16, 100)
    ladder, figures = pipeline.with_joint_weights(Ladder(model), material, None)
    assert ladder.joint_weights == fit_joint(said["confidence"])
    assert figures == joint_figures(ladder.joint_weights, said["report"])
