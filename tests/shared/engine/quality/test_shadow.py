"""Shadow checks: their verdicts, their bounds in time and memory, and the suspension of a version."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from shared.engine.engine import Engine
from shared.engine.quality import shadow as shadow_module
from shared.engine.quality.shadow import ShadowCounts
from shared.engine.request.request import Finished, GenerationRequest
from shared.ladder.policy import DepthPolicy
from shared.model.sampling import SamplingParams
from tests.fixed_costs import fixed_cost_engine
from tests.hooked_runner import HookedRunner
from tests.known_answer import NUM_NEW, PROMPT, request, right
from tests.scripted_ladder import ScriptedLadder
from tests.waiting import wait_until

RELAXED = DepthPolicy("relaxed", threshold=0.5)


def script(answer: list[int], wrong_at: int | None = None):
    """Drafts the full model's tokens with high probability, except for a wrong one at `wrong_at`."""
    token = right(answer, wrong_at)
    return lambda context: (token(context), 0.9)


def relaxed(**changes: object) -> GenerationRequest:
    """Of a router's version 7 that promises 0.05."""
    return request(**{"policy": RELAXED, "router_version": 7, "risk_bound": 0.05, **changes})


def run(engine: Engine, ladder: ScriptedLadder, **changes: object) -> list[int]:
    events = list(engine.submit(relaxed(**changes), ladder).events())
    assert isinstance(events.pop(), Finished)
    return [token.token_id for event in events for token in event.tokens]


def checked(engine: Engine, number: int, stratum=(7, 0.05)) -> ShadowCounts:
    counts = engine.shadow.counts
    wait_until(lambda: stratum in counts and counts[stratum].num_checked >= number)
    return engine.shadow.counts[stratum]


@pytest.mark.parametrize("wrong_at", [None, 1, 12, 20])
def test_a_generation_differs_where_one_token_does(loaded, answer, wrong_at):
    with fixed_cost_engine(loaded, shadow_share=1.0) as engine:
        tokens = run(engine, ScriptedLadder(script(answer, wrong_at)))
        assert (tokens == answer) == (wrong_at is None)
        assert checked(engine, 1) == ShadowCounts(1, int(wrong_at is not None), 0)


def test_an_answer_within_a_margin_is_judged_without_it(loaded, answer):
    with fixed_cost_engine(loaded, shadow_share=1.0) as engine:
        wide = DepthPolicy("relaxed", margin=1e6)
        tokens = run(engine, ScriptedLadder(script(answer, wrong_at=12)), policy=wide)
        assert tokens != answer
        assert checked(engine, 1).num_differing == 1
        run(engine, ScriptedLadder(script(answer)), policy=wide)
        assert checked(engine, 2).num_differing == 1


@pytest.mark.parametrize("penalty", [{"repetition_penalty": 1.5}, {"presence_penalty": 2.0}])
def test_a_penalised_answer_is_checked_with_its_penalty(loaded, answer, penalty):
    sampling = SamplingParams(**penalty)
    with fixed_cost_engine(loaded, shadow_share=1.0) as engine:
        run(engine, ScriptedLadder(lambda context: None), sampling=sampling)
        assert checked(engine, 1).num_differing == 0
        run(engine, ScriptedLadder(script(answer)), sampling=sampling)
        assert checked(engine, 2).num_differing == 1


@pytest.mark.parametrize(("limit", "differs"), [(None, True), (12, False), (13, True)])
def test_only_the_tokens_for_which_the_bound_holds_are_checked(loaded, answer, limit, differs):
    with fixed_cost_engine(loaded, shadow_share=1.0) as engine:
        wrong = ScriptedLadder(script(answer, wrong_at=12))
        run(engine, wrong, risk_bound_tokens=limit)
        assert checked(engine, 1).num_differing == differs


def test_tokens_after_an_end_of_sequence_are_not_checked(loaded, answer):
    ends_early = replace(loaded, eos_token_ids=frozenset([answer[5]]))
    with fixed_cost_engine(ends_early, shadow_share=1.0) as engine:
        run(engine, ScriptedLadder(script(answer, wrong_at=12)), risk_bound_tokens=NUM_NEW)
        assert checked(engine, 1).num_differing == 0


def test_only_greedy_relaxed_answers_are_sampled(loaded, answer):
    with fixed_cost_engine(loaded, shadow_share=1.0) as engine:
        ladder = ScriptedLadder(script(answer))
        run(engine, ladder, policy=DepthPolicy("exact"))
        run(engine, ladder, sampling=SamplingParams(temperature=1.0, seed=1))
        run(engine, ladder)
        checked(engine, 1)
        assert engine.shadow.counts == {(7, 0.05): ShadowCounts(num_checked=1)}
    with fixed_cost_engine(loaded, shadow_share=0.0) as engine:
        run(engine, ladder)
        assert engine.shadow.is_idle


def test_a_version_that_breaks_its_bound_is_suspended_and_stays_so(loaded, answer, caplog):
    wrong, right = ScriptedLadder(script(answer, 3)), ScriptedLadder(script(answer))
    with fixed_cost_engine(loaded, shadow_share=1.0) as engine:
        run(engine, wrong)
        checked(engine, 1)
        assert not engine.shadow.is_suspended(7), "one of one is no evidence"
        for number in range(2, 6):
            run(engine, wrong)
            checked(engine, number)
        assert engine.shadow.is_suspended(7)
        assert not engine.shadow.is_suspended(8)
        assert checked(engine, 5).lower_limit > 0.05
        for number in range(6, 12):
            run(engine, right)
            checked(engine, number)
        assert engine.shadow.is_suspended(7), "it does not come and go"
        for number in range(1, 6):
            run(engine, wrong, router_version=8, risk_bound=None)
            checked(engine, number, (8, None))
        assert not engine.shadow.is_suspended(8), "it was promised nothing"
    assert sum("served as exact" in record.message for record in caplog.records) == 1


def check_one(engine: Engine, answer: list[int], on_pass: Callable[[int], object]) -> None:
    """Has an answer checked. `on_pass` gets the number of tokens of each pass that follows the answer; a check's slice
    is one pass."""

    def on_event(event: object) -> None:  # in the engine's thread, before the check begins
        if isinstance(event, Finished):
            engine.runner.before["run"] = lambda ids, *_: on_pass(ids.shape[1])

    engine.submit(relaxed(), ScriptedLadder(script(answer)), on_event=on_event)


def test_checks_run_only_while_the_engine_is_idle(loaded, answer, monkeypatch):
    """No slice of a check runs while a request runs; a check that has begun stops between its slices."""
    monkeypatch.setattr(shadow_module, "SLICE_TOKENS", 2)
    with fixed_cost_engine(loaded, shadow_share=1.0, runner_of=HookedRunner) as engine:
        slices: list[int] = []
        live = threading.Event()
        submitted = threading.Event()

        def on_pass(num_tokens: int) -> None:
            if num_tokens != 2:  # a step of the other request
                return
            slices.append(engine.num_running + engine.num_waiting)
            if len(slices) == 3:
                live.set()
                assert submitted.wait(30)

        check_one(engine, answer, on_pass)
        assert live.wait(30)
        while_live: list[int] = []
        ended = threading.Event()

        def on_event(event: object) -> None:  # in the engine's thread, between its steps
            if event is None:
                ended.set()
            else:
                while_live.append(len(slices))

        engine.submit(request(), on_event=on_event)
        submitted.set()
        assert ended.wait(60)
        assert set(while_live) == {3}, "the slice under way ended, and no other began"
        checked(engine, 1)
    assert len(slices) > 4
    assert set(slices) == {0}


def test_the_queue_is_bounded_and_dropped_checks_are_counted(loaded, answer, monkeypatch):
    monkeypatch.setattr(shadow_module, "MAX_WAITING", 2)
    with fixed_cost_engine(loaded, shadow_share=1.0) as engine:
        long = engine.submit(request(100))
        for _ in range(5):
            run(engine, ScriptedLadder(script(answer)))
        assert long.next_event(30) is not None
        assert engine.num_running == 1, "it has been running all the while"
        assert engine.shadow.counts == {(7, 0.05): ShadowCounts(num_dropped=3)}
        list(long.events())
        assert checked(engine, 2).num_dropped == 3


def test_a_check_gives_its_memory_back_to_requests(loaded, answer, monkeypatch):
    """With room for one request only, the current check is restarted later, so that the request need not wait."""
    monkeypatch.setattr(shadow_module, "SLICE_TOKENS", 2)
    with fixed_cost_engine(loaded) as engine:
        token_bytes = engine.kv_token_bytes
    num_tokens = len(PROMPT) + NUM_NEW
    with fixed_cost_engine(
        loaded, shadow_share=1.0, kv_budget_bytes=num_tokens * token_bytes, prefix_cache_bytes=0, runner_of=HookedRunner
    ) as engine:
        started = threading.Event()
        go = threading.Event()
        held_by_check: list[int] = []
        held_beside_request: list[int] = []

        def on_pass(_: int) -> None:
            if engine.num_running:
                held_beside_request.append(engine.shadow.num_tokens)
                return
            held_by_check.append(engine.shadow.num_tokens)
            if len(held_by_check) == 3:
                started.set()
                assert go.wait(30)

        check_one(engine, answer, on_pass)
        assert started.wait(30)
        handle = engine.submit(request())
        go.set()
        list(handle.events())
        checked(engine, 1)
    assert held_by_check[1] == num_tokens
    assert set(held_beside_request) == {0}


def test_a_check_that_fails_ends_no_engine(loaded, answer):
    def fail(_: int) -> None:
        del engine.runner.before["run"]
        raise RuntimeError("device lost")

    with fixed_cost_engine(loaded, shadow_share=1.0, runner_of=HookedRunner) as engine:
        check_one(engine, answer, fail)
        wait_until(lambda: engine.shadow.counts and engine.shadow.is_idle)
        assert engine.shadow.counts == {(7, 0.05): ShadowCounts(num_dropped=1)}
        run(engine, ScriptedLadder(script(answer)), policy=DepthPolicy("full"))


@pytest.mark.parametrize("wrong_at", [None, 1, 12])
def test_an_answer_that_was_put_back_is_checked(loaded, answer, wrong_at):
    """Its tokens before that are read again, and are a part of the answer all the same."""
    events, ended = [], threading.Event()
    with fixed_cost_engine(loaded, shadow_share=1.0, max_running=1) as engine:

        def on_event(event):
            events.append(event)
            if len(events) == 3:
                engine.submit([7], policy="full", max_tokens=3)
            if event is None:
                ended.set()

        ladder = ScriptedLadder(script(answer, wrong_at))
        engine.submit(relaxed(priority=1), ladder, on_event=on_event)
        assert ended.wait(60)
        assert engine.statistics.num_put_back == 1
        assert checked(engine, 1) == ShadowCounts(1, int(wrong_at is not None), 0)
