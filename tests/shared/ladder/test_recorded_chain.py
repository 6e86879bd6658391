"""An exit head whose chains are drafted as recorded work."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shared.ladder.chain_exit import ChainSteps
from shared.ladder.confidence_head import HIGHEST
from shared.ladder.exit_head import chained
from shared.ladder.head_rows import gather_rows
from shared.ladder.ladder import BoundLadder, Ladder
from shared.ladder.recorded_chain import MAX_CHAINS, NUM_CHAINS, NUM_DRAFTS
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.paged_runner import PagedRunner
from shared.model.recorder import host_syncs
from shared.ops.chains import Chains, ChainStart, chain_lengths
from tests.chain_starts import begun
from tests.device_waits import Reads
from tests.paged import load_family, make_runner
from tests.random_ladder import random_ladder
from tests.recorders import TracingRecorder
from tests.tiers import tiered

WIDTH = 32


@pytest.fixture(scope="module")
def recorder() -> TracingRecorder:
    return TracingRecorder()


@pytest.fixture(scope="module")
def runner(recorder: TracingRecorder) -> PagedRunner:
    torch.manual_seed(0)
    return make_runner(load_family("llama"), recorder=recorder)


@pytest.fixture(scope="module")
def ladder(runner: PagedRunner) -> Ladder:
    return random_ladder(runner.loaded, 1, (0,))


@pytest.fixture(scope="module")
def bound(ladder: Ladder, runner: PagedRunner) -> BoundLadder:
    found = ladder.bind(runner)
    list(found.prepare())
    return found


def start_of(tokens: Sequence[int], place: int = 0, room: int = NUM_DRAFTS) -> ChainStart:
    return ChainStart(tokens, place, room, 1.0, 1.0, 0.0)


@torch.inference_mode()
def expected_chain(
    ladder: Ladder, runner: PagedRunner, begin: Tensor, start: ChainStart
) -> list[tuple[int, float, Tensor]]:
    """Token by token, one chain alone: (token, probability, output) of each draft."""
    [one] = ladder.exits
    vocabulary = ladder.draft_vocabulary
    assert vocabulary is not None
    rows, bias = gather_rows(runner.loaded.parts.head, vocabulary)
    step = ChainSteps(one.head, one.confidence, rows, bias)  # type: ignore[arg-type]
    states = (chained(begin) if begin.dim() == 1 else begin)[None]
    place, found = start.place, []
    *seen, newest = start.tokens
    for token in seen:
        states, place = chained(step.output(states, runner.embed_tokens([token], [0]))), place + 1
    for _ in range(NUM_DRAFTS):
        place += 1
        entering = runner.embed_tokens([newest], [0])
        index, probability, output = step.step(states, entering, torch.tensor([place]))
        newest, states = int(vocabulary[index[0]]), chained(output)
        found.append((newest, float(probability[0]), output[0]))
    return found


def check(found: Chains, row: int, expected: Sequence[tuple[int, float, Tensor]], length: int) -> None:
    assert found.lengths[row] == length
    for place, (token, probability, output) in enumerate(expected[:length]):
        assert found.tokens[row, place] == token
        assert float(found.probabilities[row, place]) == pytest.approx(probability, abs=1e-6)
        torch.testing.assert_close(found.outputs[row, place], output, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", tiered([1, 2, 5, 8, 9, 17, MAX_CHAINS, MAX_CHAINS + 3], {1, 5, 9, MAX_CHAINS + 3}))
def test_each_chain_is_its_own(ladder, bound, runner, recorder, count):
    """Chains that begin and chains that go on, fed up to three tokens, one of them up to twenty, in any company; also
    after calls with other chains."""
    num_recorded, generator = recorder.num_recorded, torch.Generator().manual_seed(count)
    begins, starts = [], []
    for number in range(count):
        goes_on = number % 3 == 1
        shape = (WIDTH,) if goes_on else (3, WIDTH)
        begins.append(torch.randn(shape, generator=generator))
        tokens = [4 + number % 7, 9, 5 + number % 5][: 1 + number % 3]
        if number == count // 2:
            tokens = [4 + place % 11 for place in range(count % 22)] + tokens
        starts.append(start_of(tokens, 2 if goes_on else 0, 1 + number % (NUM_DRAFTS + 2)))
    found = bound.propose(0, begun(begins, starts))
    assert recorder.num_recorded == num_recorded, "all of it was recorded when it was prepared"
    for row, (begin, start) in enumerate(zip(begins, starts, strict=True)):
        check(found, row, expected_chain(ladder, runner, begin, start), min(start.room, NUM_DRAFTS))


def test_a_chain_goes_on_from_any_of_its_outputs(bound):
    begin = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    whole = bound.propose(0, [start_of([4])._replace(begin=begin)])
    later = start_of([int(whole.tokens[0, 0])], place=1)
    rest = bound.propose(0, [later._replace(begin=whole.outputs[0, 0])])
    assert torch.equal(rest.tokens[:, :-1], whole.tokens[:, 1:])
    torch.testing.assert_close(rest.probabilities[:, :-1], whole.probabilities[:, 1:], rtol=0, atol=1e-5)


def test_outputs_are_the_callers_own(bound):
    """A later call writes to the same tensors."""
    begins = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(0)).unbind()
    first = bound.propose(0, [start_of([4])._replace(begin=begins[0])])
    kept = first.outputs.clone()
    bound.propose(0, [start_of([5])._replace(begin=begins[1])])
    assert torch.equal(first.outputs, kept)


def test_a_chain_ends_where_its_survival_does(bound):
    begin = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    whole = bound.propose(0, [start_of([4])._replace(begin=begin)])
    chances = [min(probability * 0.8, HIGHEST) for probability in whole.probabilities[0].tolist()]
    for length in range(1, NUM_DRAFTS + 1):
        survival = 0.9 * float(torch.tensor(chances[:length]).prod())
        start = ChainStart([4], 0, NUM_DRAFTS, 0.9, 0.8, survival * 1.001, begin=begin)
        assert bound.propose(0, [start]).lengths.tolist() == [length]
        longer = bound.propose(0, [start._replace(least_survival=survival * 0.999)])
        assert longer.lengths.tolist() == [min(length + 1, NUM_DRAFTS)]


def test_the_length_of_a_chain():
    start = ChainStart([4], 0, 4, 0.9, 2.0, 0.5)
    survivals = [0.72, 0.576, 0.46]  # the draft after which survival is too low is made, and is the last
    chances = torch.tensor([[0.4] * 9, [0.1, *[0.9] * 8], [0.9] * 9, [math.nan] * 9], dtype=torch.float64)
    assert chain_lengths([start] * 4, chances, HIGHEST).tolist() == [len(survivals), 1, 4, 1]
    assert chain_lengths([start], chances[2:3, :1], HIGHEST).tolist() == [1], "no more than were made"


def test_recordings_do_not_wait_for_the_device(ladder, runner):
    """The op of the router keeps its tickets: a recording must find them where they were."""
    bound = ladder.bind(runner)
    [one] = bound._bound
    for size in NUM_CHAINS:
        assert not host_syncs(lambda size=size: one._step(size))  # type: ignore[union-attr, misc]


def test_a_call_is_one_replay_and_waits_for_the_device_once(bound, recorder):
    """Whatever its chains are fed."""
    reads, num_replays = Reads(), recorder.num_replays
    begins = torch.randn(5, 3, WIDTH).unbind()
    starts = [start_of([4, 5, 6, 7][: 1 + number % 4]) for number in range(5)]
    with reads:
        bound.propose(0, begun(begins, starts))
    assert reads.found == ["cpu"]
    assert recorder.num_replays == num_replays + 1


def test_a_runner_over_contiguous_caches_drafts_the_same_without_recording(ladder, bound, runner):
    """So a calibration on a GPU replays what a worker drafts there."""
    begin = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    expected = bound.propose(0, [start_of([4])._replace(begin=begin)])
    contiguous = ContiguousRunner(runner.loaded)
    work_done = []
    assert contiguous.record(work := lambda: work_done.append(1)) is work
    assert ladder.bind(contiguous).state_depths == bound.state_depths == ()
    found = ladder.bind(contiguous).propose(0, [start_of([4])._replace(begin=begin)])
    assert torch.equal(found.tokens, expected.tokens)
