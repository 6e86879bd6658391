"""Drafting by walks: the same drafts as exit by exit, and exact stays full, whoever decides."""

import math
from collections.abc import Sequence as Rows

import pytest
import torch

from bench.imposed import SHAPES, impose
from inference_service.engine.chain import Chain
from inference_service.engine.decoder import Decoder
from inference_service.engine.drafting import Drafter, draft_chains
from inference_service.engine.engine import Engine
from inference_service.engine.growing import GrowingChain
from inference_service.engine.planner import ExitCost, ExitGains, PassCosts, Reliability
from inference_service.engine.request import GenerationRequest, StoppingParams, TokenChunk
from inference_service.engine.sequence import Sequence
from inference_service.engine.walking import ask_by_walk
from shared.ladder.ladder import BoundLadder, Ladder
from shared.ladder.policy import DepthPolicy
from shared.ladder.rungs import exit_name
from shared.ladder.walk import Walked, Walker
from shared.model.load import LoadedModel
from shared.model.paged_runner import PagedRunner
from tests.paged import load_family, make_runner
from tests.random_ladder import random_ladder
from tests.recorders import TracingRecorder

DEPTHS = (0, 2, 3)
NUM_NEW = 12
CHEAP = PassCosts((1.0,) * 7, exits=(ExitCost(1e-6, 1e-7),) * len(DEPTHS))


class _Eager(ExitGains):
    """Expects every exit to bring something, whatever it has brought."""

    def expected(self, index: int, known: float) -> float:
        return 1.0


@pytest.fixture(scope="module", params=[False, True], ids=["host", "device"])
def composes(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def runner(composes: bool) -> PagedRunner:
    torch.manual_seed(0)
    recorder = TracingRecorder(composes=composes)
    return make_runner(load_family("llama"), 1 << 21, recorder=recorder)


def started(
    runner: PagedRunner,
    ladder: BoundLadder,
    drafter: Drafter,
    count: int,
    policy: DepthPolicy,
) -> list[tuple[Sequence, Drafter]]:
    """Sequences that have read prompts of their own."""
    decoder = Decoder(runner)
    found = []
    for number in range(count):
        request = GenerationRequest(
            tuple(range(3 + number, 9 + 3 * number)),
            stopping=StoppingParams(max_tokens=20, ignore_eos=True),
            policy=policy,
        )
        sequence = decoder.start(request, ladder, drafter.served(request))
        while not sequence.num_generated:
            decoder.step([(sequence, drafter)], CHEAP)
        found.append((sequence, drafter))
    return found


@pytest.mark.parametrize("min_layers", [0, 1, 3])
def test_the_drafts_of_a_walk_are_those_of_asking_exit_by_exit(
    runner: PagedRunner, min_layers: int
) -> None:
    ladder = random_ladder(runner.loaded, 4, DEPTHS).bind(runner)
    drafter = Drafter(runner, CHEAP, _Eager((1.0,) * len(DEPTHS)))
    policy = DepthPolicy("exact", max_drafts=3, min_layers=min_layers)
    batch = started(runner, ladder, drafter, 4, policy)
    walked = draft_chains(batch, len(batch))
    walk, ladder.walk = ladder.walk, None
    try:
        asked = draft_chains(batch, len(batch))
    finally:
        ladder.walk = walk
    for one, other in zip(walked, asked, strict=True):
        assert one.drafts == other.drafts
        assert one.reached == other.reached
        assert one.num_layer_executions == other.num_layer_executions
    assert max(len(chain.drafts) for chain in walked) > 1


def growing_of(batch: list[tuple[Sequence, Drafter]], costs: PassCosts) -> list[GrowingChain]:
    return [GrowingChain(sequence, costs, len(batch), drafts=True) for sequence, _ in batch]


def thresholds_of(
    runner: PagedRunner,
    gains: ExitGains,
    costs: PassCosts,
    *,
    known: tuple[float, float, float] = (0.0, 0.0, 0.0),
    min_layers: int = 0,
) -> list[tuple[float, ...]]:
    """Of three chains that walk together, their next tokens already known so well."""
    ladder = random_ladder(runner.loaded, 4, DEPTHS).bind(runner)
    drafter = Drafter(runner, CHEAP, _Eager((1.0,) * len(DEPTHS)))
    policy = DepthPolicy("exact", max_drafts=3, min_layers=min_layers)
    batch = started(runner, ladder, drafter, 3, policy)
    growing = growing_of(batch, costs)
    for one, probability in zip(growing, known, strict=True):
        one.known = probability
    seen: list[Walker] = []

    def noted(walkers: Rows[Walker]) -> list[Walked]:
        assert ladder.walk is not None
        seen.extend(walkers)
        return ladder.walk(walkers)

    ask_by_walk(noted, ladder, growing, len(batch), runner, costs, gains)
    return [walker.thresholds for walker in seen]


def test_no_walk_where_no_exit_is_worth_it(runner: PagedRunner) -> None:
    dear = PassCosts((1.0,) * 7, exits=(ExitCost(5.0, 5.0),) * len(DEPTHS))
    assert thresholds_of(runner, _Eager((1.0,) * 3), dear) == []
    assert thresholds_of(runner, ExitGains((0.0,) * 3), CHEAP) == []


def test_the_deepest_exit_worth_it_ends_the_walk(runner: PagedRunner) -> None:
    costs = PassCosts((1.0,) * 7, exits=(ExitCost(1e-6, 1e-7), ExitCost(1e-6, 1e-7), ExitCost(9.0, 9.0)))  # fmt: skip
    for first, second, third in thresholds_of(runner, _Eager((1.0,) * 3), costs):
        assert first == math.inf, "the second is always worth it here"
        assert (second, third) == (0.0, 0.0)


class _Graded(ExitGains):
    """Exits bring much only to those that know little."""

    def __init__(self, rest: float = 0.0) -> None:
        super().__init__((1.0,) * len(DEPTHS))
        self._rest = rest

    def expected(self, index: int, known: float) -> float:
        return 0.5 if known < 0.6 else self._rest


def test_who_is_sure_enough_for_all_deeper_exits_leaves(runner: PagedRunner) -> None:
    for thresholds in thresholds_of(runner, _Graded(), CHEAP):
        assert thresholds == (pytest.approx(0.6), pytest.approx(0.6), 0.0)
    for thresholds in thresholds_of(runner, _Graded(), CHEAP, min_layers=1):
        assert thresholds == (math.inf, pytest.approx(0.6), 0.0)
    assert thresholds_of(runner, _Graded(), CHEAP, known=(0.7, 0.7, 0.7)) == []


def test_who_only_comes_along_leaves_at_once(runner: PagedRunner) -> None:
    """In company an exit is cheap for one more, who would not go deeper for a share of the cost."""
    costs = PassCosts((1.0,) * 7, exits=(ExitCost(0.15, 0.001),) * len(DEPTHS))
    first, second, third = thresholds_of(runner, _Graded(0.01), costs, known=(0.0, 0.7, 0.0))
    assert first == third == (pytest.approx(0.6), pytest.approx(0.6), 0.0)
    assert second == (0.0, 0.0, 0.0)


def test_what_exits_bring_is_learnt(runner: PagedRunner) -> None:
    gains = ExitGains((0.9,) * len(DEPTHS))

    def expected() -> list[list[float]]:
        return [[gains.expected(i, known / 10) for known in range(10)] for i in range(len(DEPTHS))]

    before = expected()
    thresholds_of(runner, gains, CHEAP)
    assert before[0] != expected()[0]


def test_a_threshold_is_what_the_router_must_say_as_far_as_it_is_trusted(
    runner: PagedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = {exit_name(DEPTHS[0]): 0.5, exit_name(DEPTHS[1]): 1.5}
    monkeypatch.setattr(Reliability, "factor", lambda self, rung: trusted.get(rung, 1.0))
    for thresholds in thresholds_of(runner, _Graded(), CHEAP):
        assert thresholds == (pytest.approx(1.2), pytest.approx(0.4), 0.0)


def test_tokens_before_are_brought_along(runner: PagedRunner) -> None:
    """An earlier draft left before the exit that this one may go to."""
    ladder = random_ladder(runner.loaded, 4, DEPTHS).bind(runner)
    drafter = Drafter(runner, CHEAP, _Eager((1.0,) * len(DEPTHS)))
    [(sequence, _)] = started(runner, ladder, drafter, 1, DepthPolicy("exact", max_drafts=3))
    [one] = growing_of([(sequence, drafter)], CHEAP)
    chain: Chain = one.chain
    for token in (5, 6):
        one.look_up()
        ladder_draft = ladder.ask(0, runner.embed(torch.tensor([[token]]))[0], one.deep_state[None], [1])[0]  # fmt: skip
        one.consider(ladder_draft)
        assert one.extend()
    assert chain.reached == [0, 0, 0]
    one.look_up()
    assert ladder.walk is not None
    ask_by_walk(ladder.walk, ladder, [one], 1, runner, CHEAP, _Eager((1.0,) * 3))
    assert chain.reached == [DEPTHS[-1]] * 3
    # The state is that of the tokens in one pass from the start.
    cache = runner.new_cache(len(sequence.tokens) + 3)
    tokens = [*sequence.tokens[:-1], *chain.tokens]
    states = runner.run(torch.tensor([tokens]), cache, first=0, last=DEPTHS[-1], base=0)
    torch.testing.assert_close(chain.states[-1], states[0, -1])


def all_tokens(engine: Engine, prompt: tuple[int, ...], policy: DepthPolicy) -> tuple[int, ...]:
    stopping = StoppingParams(max_tokens=NUM_NEW, ignore_eos=True)
    handle = engine.submit(GenerationRequest(prompt, policy=policy, stopping=stopping))
    chunks = [event for event in handle.events() if isinstance(event, TokenChunk)]
    return tuple(token.token_id for chunk in chunks for token in chunk.tokens)


def _engine(loaded: LoadedModel, ladder: Ladder, composes: bool) -> Engine:
    def runner_of(model: LoadedModel, budget: int) -> PagedRunner:
        return make_runner(model, budget, recorder=TracingRecorder(composes=composes))

    return Engine(loaded, ladder, kv_budget_bytes=1 << 21, runner_of=runner_of)


def test_exact_is_full_whatever_random_exits_say(composes: bool) -> None:
    torch.manual_seed(0)
    loaded = load_family("llama")
    with _engine(loaded, random_ladder(loaded, 4, DEPTHS), composes) as engine:
        for prompt in ((5, 17, 3, 44, 8), tuple(range(2, 40)), (9,)):
            full = all_tokens(engine, prompt, DepthPolicy("full"))
            assert all_tokens(engine, prompt, DepthPolicy("exact", max_drafts=4)) == full


def test_right_drafts_save_layers_in_company(composes: bool) -> None:
    imposed = impose(SHAPES["tiny"], (2,), 0.9, accelerate=False)
    stopping = StoppingParams(max_tokens=40, ignore_eos=True)
    policy = DepthPolicy("exact", max_drafts=4)
    with _engine(imposed.loaded, imposed.ladder, composes) as engine:
        prompts = [tuple(imposed.prompt(50 * number, 8)) for number in range(5)]
        handles = [
            engine.submit(GenerationRequest(prompt, policy=policy, stopping=stopping))
            for prompt in prompts
        ]
        for prompt, handle in zip(prompts, handles, strict=True):
            *chunks, finished = handle.events()
            tokens = [token.token_id for chunk in chunks for token in chunk.tokens]
            start = int((imposed.cycle == prompt[-1]).nonzero()) + 1
            assert tokens == imposed.prompt(start, 40)
            assert finished.depth.num_accepted > 0.5 * finished.depth.num_drafted
