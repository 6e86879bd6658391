"""The replay follows every chain that a worker could build, and only those."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from calibrator_service.calibration.report.replay import ROUNDING, Differing, Drafts, Replayer, _Replay
from calibrator_service.calibration.states.ngram_builder import NgramTableBuilder
from calibrator_service.calibration.text.shards import TokenSequence
from calibrator_service.calibration.training.tables import MAX_CHAIN
from shared.engine.drafting.costs import MAX_PASS_TOKENS
from shared.ladder.confidence_head import ConfidenceHead
from shared.ladder.exit_head import ExitHead
from shared.ladder.exits import LayerExit
from shared.ladder.ladder import Ladder, ModelIdentity
from shared.ladder.rungs import Draft
from shared.ladder.table_confidence import SIZES, TableConfidence
from shared.ladder.table_proposer import TableProposer
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel
from shared.ops.chains import ChainStart

PROMPT = (0, 7, 9)
NUM_NEW = 14
FIRST = len(PROMPT)  # the position of the first token that the prompt's pass chooses

Script = Callable[[int, int], tuple[bool, float] | None]


def greedy(loaded: LoadedModel, prompt: Sequence[int] = PROMPT) -> TokenSequence:
    runner = ContiguousRunner(loaded)
    tokens = list(prompt)
    for _ in range(NUM_NEW):
        deep = runner.capture(torch.tensor([tokens]), [runner.num_layers])[runner.num_layers]
        tokens.append(int(runner.logits(deep[0, -1]).argmax()))
    return TokenSequence(tuple(tokens), len(prompt))


def scripted(
    monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel, sequence: TokenSequence, script: Script
) -> Differing:
    """The replay's result if the table drafts are those of `script`: (settled position, earlier drafts) -> (is right,
    probability)."""

    class Scripted:
        def __init__(self, _: Any, prompt: Sequence[int], *_others: Any) -> None:
            self.tokens = list(prompt)

        def append(self, tokens: Sequence[int]) -> None:
            self.tokens += tokens

        def best(self, drafted: Sequence[int] = ()) -> Draft | None:
            settled, chained = len(self.tokens) - 1, len(drafted)
            whole = [*self.tokens, *drafted]
            assert whole == list(sequence.tokens[: len(whole)]), "drafts see nothing but the truth"
            said = script(settled, chained)
            if said is None:
                return None
            choice = sequence.tokens[settled + chained + 1]
            return Draft(choice if said[0] else choice + 1, said[1], "suffix", 0)

    monkeypatch.setattr("calibrator_service.calibration.report.replay.TableProposer", Scripted)
    replayer = Replayer(Ladder(ModelIdentity.of(loaded)), ContiguousRunner(loaded))
    (found,) = replayer.differing([sequence])
    return found


def test_a_wrong_draft_at_a_chained_position_is_found(monkeypatch, counting):
    sequence = greedy(counting)

    def planted(before: float, probability: float, chained: int = 2) -> Script:
        """Wrong only as the third draft of the chain from position FIRST + 4."""

        def script(settled: int, place: int) -> tuple[bool, float] | None:
            if settled != FIRST + 4 or place > chained:
                return None
            return (False, probability) if place == chained else (True, before)

        return script

    def found(script: Script) -> float:
        return scripted(monkeypatch, counting, sequence, script).threshold

    assert found(planted(0.95, 0.9)) == 0.9
    # No threshold above what the drafts before have lets the chain come so far.
    assert found(planted(0.8, 0.9)) == 0.8
    assert found(planted(0.6, 0.9)) == 0.6
    assert found(planted(0.95, 0.9, chained=0)) == 0.9
    assert found(planted(0.95, 0.9, chained=MAX_CHAIN - 1)) == 0.9
    assert found(planted(0.95, 0.9, chained=MAX_CHAIN)) == 0.0
    assert found(lambda settled, place: (True, 0.999)) == 0.0


def test_every_position_after_the_first_token_counts_and_no_other(monkeypatch, counting):
    sequence = greedy(counting)
    last = len(sequence.tokens) - 1
    for wrong_after, expected in ((FIRST - 1, 0.0), (FIRST, 0.9), (last - 1, 0.9), (last, 0.0)):

        def script(settled: int, place: int, at: int = wrong_after) -> tuple[bool, float] | None:
            return (False, 0.9) if (settled, place) == (at, 0) else None

        assert scripted(monkeypatch, counting, sequence, script).threshold == expected


def wrong_gaps(loaded: LoadedModel, sequence: TokenSequence) -> list[float]:
    """By position, how far the model's own choice leads the wrong token of `scripted`, as a difference of
    log-probabilities."""
    logits = loaded.model(torch.tensor([sequence.tokens])).logits[0].double().log_softmax(-1)
    gaps = [math.inf] * FIRST
    for position in range(FIRST, len(sequence.tokens)):
        row, choice = logits[position - 1], sequence.tokens[position]
        gaps.append(float(row[choice] - row[choice + 1]))
    return gaps


@torch.inference_mode()
def test_a_margin_differs_from_the_nearest_wrong_draft_on(monkeypatch, counting):
    """However unlikely the router finds the draft and those before it: a worker may verify any."""
    sequence = greedy(counting)
    gaps = wrong_gaps(counting, sequence)

    def found(*places: tuple[int, int]) -> float:
        """The least margin if drafts are wrong at these (settled position, earlier drafts) only."""

        def script(settled: int, place: int) -> tuple[bool, float]:
            return (settled, place) not in places, 0.01

        return scripted(monkeypatch, counting, sequence, script).margin

    def near(*positions: int) -> object:
        return pytest.approx(min(gaps[one] for one in positions), abs=2 * ROUNDING)

    assert found() == math.inf
    for place in range(MAX_CHAIN):
        assert found((FIRST + 1, place)) == near(FIRST + 2 + place)
    assert found((FIRST + 1, MAX_CHAIN)) == math.inf
    assert found((FIRST, 0), (FIRST + 3, 1)) == near(FIRST + 1, FIRST + 5)
    # No chain gets past a draft that is wrong, unless that one was accepted.
    assert found((FIRST, 0), (FIRST, 1)) == near(FIRST + 1)


def test_an_answer_that_is_not_the_models_differs_at_every_threshold(counting):
    sequence = greedy(counting)
    other = (*sequence.tokens[:-1], sequence.tokens[-1] + 1)
    replayer = Replayer(Ladder(ModelIdentity.of(counting)), ContiguousRunner(counting))
    found = replayer.differing([sequence, TokenSequence(other, FIRST)])
    assert found == [Differing(0.0, math.inf), Differing(1.0, 0.0)]


def test_a_worker_chains_no_more_drafts_than_the_replay():
    assert MAX_PASS_TOKENS - 1 <= MAX_CHAIN


# (settled position, place in the chain) -> the drafts of all rungs there.
DraftsByPlace = dict[tuple[int, int], Drafts]


def random_ladder(loaded: LoadedModel, seed: int) -> Ladder:
    """A ladder with untrained exits, tables of part of the text, and routers with high probabilities."""
    torch.manual_seed(seed)
    exits = []
    for depth in (0, 2):
        head, confidence = ExitHead(32, 24), ConfidenceHead(32, 8)
        torch.nn.init.constant_(confidence.output.bias, 2.0)
        exits.append(LayerExit(depth, head.eval(), confidence.eval().requires_grad_(False)))
    builder = NgramTableBuilder()
    for start in range(5, 17):
        text = greedy(loaded, (0, start, start + 2)).tokens
        array = torch.tensor(text).numpy()
        builder.add(array[:-1], array[1:], 0)
    weights = [[0.0] * size for size in SIZES]
    weights[2] = [0.3 * number for number in range(SIZES[2])]
    return Ladder(
        ModelIdentity.of(loaded),
        TableConfidence(0.5, weights),
        builder.build(1 << 16),
        TableConfidence(1.0, weights),
        tuple(exits),
        torch.arange(32),
    )


def by_the_book(loaded: LoadedModel, ladder: Ladder, sequence: TokenSequence) -> tuple[float, DraftsByPlace]:
    """The same result from the worker's drafter, one chain and one exit at a time, and all drafts."""
    runner = ContiguousRunner(loaded)
    bound = ladder.bind(runner)
    tokens, end = sequence.tokens, len(sequence.tokens)
    highest, drafted = 0.0, DraftsByPlace()
    for settled in range(sequence.answer_start, end - 1):
        drafter, reach = TableProposer(ladder, tokens[: settled + 1]), 1.0
        outputs: dict[int, torch.Tensor] = {}
        for chained in range(min(MAX_CHAIN, end - 1 - settled)):
            at = settled + chained
            states = runner.capture(torch.tensor([tokens[: at + 1]]), [0, 1, 2, 3])
            drafts = [drafter.best(tokens[settled + 1 : at + 1])]
            for index, depth in enumerate(bound.depths):
                entering = states[depth][:, at]
                settled_states = [states[d][0, settled - 1] for d in (*bound.kept_depths, 3)]
                begin, place, unseen = torch.stack(settled_states), 0, tokens[settled : at + 1]
                if depth in bound.state_depths and chained:
                    begin, place, unseen = outputs[index], chained, tokens[at : at + 1]
                start = ChainStart(unseen, place, 1, 1.0, 1.0, 0.0, entering)
                [[one]] = bound.propose(index, [start._replace(begin=begin)])
                drafts.append(one.draft)
                outputs[index] = one.output
            said = [d for d in drafts if d is not None]
            drafted[settled, chained] = [(d.token, d.probability) for d in said]
            wrong = [d.probability for d in said if d.token != tokens[at + 1]]
            right = [d.probability for d in said if d.token == tokens[at + 1]]
            highest = max(highest, min(reach, max(wrong, default=0.0)))
            reach = min(reach, max(right, default=0.0))
            if reach == 0.0:
                break
    return highest, drafted


@pytest.mark.parametrize("seed", [1, 2])
def test_the_replay_equals_a_worker_chain_by_chain(counting, monkeypatch, seed):
    ladder = random_ladder(counting, seed)
    sequences = [greedy(counting, (0, start)) for start in range(6, 12)]
    sequences.append(greedy(counting, tuple(range(5, 24))))
    replayed: dict[TokenSequence, DraftsByPlace] = {sequence: {} for sequence in sequences}
    take = _Replay.take

    def noted(self: _Replay, settled: int, drafts: Drafts, chained: int) -> float:
        replayed[self.sequence][settled, chained] = drafts
        return take(self, settled, drafts, chained)

    monkeypatch.setattr(_Replay, "take", noted)
    found = Replayer(ladder, ContiguousRunner(counting)).differing(sequences)
    assert len({round(one.threshold, 3) for one in found}) > 2
    for sequence, one in zip(sequences, found, strict=True):
        expected, drafted = by_the_book(counting, ladder, sequence)
        assert one.threshold == pytest.approx(expected, abs=1.01 * ROUNDING)
        # The highest threshold depends on few drafts, so all are compared, too.
        assert replayed[sequence].keys() == drafted.keys()
        for place, drafts in drafted.items():
            for ours, theirs in zip(replayed[sequence][place], drafts, strict=True):
                assert ours == (theirs[0], pytest.approx(theirs[1], abs=1.01 * ROUNDING))
