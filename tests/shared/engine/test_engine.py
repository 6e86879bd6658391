"""The engine's thread: shared steps, queue, cancel, pause, deadline, shutdown."""

import threading
from contextlib import suppress
from typing import Any, NoReturn

import pytest

from shared.engine.request.admission import TRIAL_INTERVAL_S
from shared.engine.request.handle import GenerationHandle
from shared.engine.request.request import Finished, GenerationRequest, StoppingParams, TokenChunk
from shared.engine.step import Decoder
from shared.errors import (
    Cancelled,
    Corrupt,
    DeadlineExceeded,
    Exhausted,
    InvalidInput,
    PreconditionFailed,
    PromptTooLong,
    RouterMismatch,
    Unavailable,
    UnsupportedModel,
)
from shared.ladder.policy import DepthPolicy
from shared.model.sampling import SamplingParams
from tests.families import NUM_LAYERS, VOCABULARY_SIZE
from tests.fixed_costs import FixedCosts, fixed_cost_engine
from tests.hooked_runner import HookedRunner
from tests.scripted_ladder import ScriptedLadder
from tests.waiting import wait_until

PROMPT = (5, 17, 3, 44, 8)
FULL = DepthPolicy("full")
KV_TOKEN_BYTES = NUM_LAYERS * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, bytes


def request(max_tokens: int = 8, **changes: object) -> GenerationRequest:
    options = {"prompt_ids": PROMPT, "policy": FULL, **changes}
    return GenerationRequest(stopping=StoppingParams(max_tokens=max_tokens), **options)


def events_so_far(handle: GenerationHandle) -> list[object]:
    events: list[object] = []
    with suppress(DeadlineExceeded):
        while True:
            events.append(handle.next_event(0))
    return events


def test_requests_take_turns_and_each_gets_its_own_answer(loaded):
    prompts = [PROMPT[i:] + PROMPT[:i] for i in range(5)] * 2
    with fixed_cost_engine(loaded) as engine:
        alone = [engine.generate(p, policy="full", max_tokens=12).token_ids for p in prompts]
        handles = [engine.submit(request(12, prompt_ids=p)) for p in prompts]
        together = [
            tuple(
                token.token_id for event in handle.events() if isinstance(event, TokenChunk) for token in event.tokens
            )
            for handle in handles
        ]
    assert together == alone


def test_a_long_request_does_not_keep_a_later_short_one_waiting(loaded):
    order: list[str] = []
    done = threading.Semaphore(0)

    def watch(name: str):
        def on_event(event: object) -> None:
            if isinstance(event, Finished):
                order.append(name)
                done.release()

        return on_event

    with fixed_cost_engine(loaded) as engine:
        engine.submit(request(100), on_event=watch("long"))
        engine.submit(request(5), on_event=watch("short"))
        for _ in range(2):
            assert done.acquire(timeout=60)
    assert order == ["short", "long"]


def test_cancel_frees_the_slot_within_one_step(loaded):
    steps_after_cancel: list[int] = []
    with fixed_cost_engine(loaded, runner_of=HookedRunner) as engine:
        handle = engine.submit(request(110))
        engine.runner.before["run"] = lambda *_: handle.is_cancelled and steps_after_cancel.append(1)
        assert isinstance(handle.next_event(30), TokenChunk)
        handle.cancel()
        events = []
        while (event := handle.next_event(30)) is not None:
            events.append(event)
        assert isinstance(events[-1], Cancelled)
        assert not any(isinstance(event, Finished) for event in events)
        assert engine.num_running == 0
    assert len(steps_after_cancel) <= 1


def test_leaving_the_events_early_cancels(loaded):
    with fixed_cost_engine(loaded) as engine:
        handle = engine.submit(request(110))
        events = handle.events()
        next(events)
        events.close()
        assert handle.is_cancelled


def test_a_paused_request_stands_still_and_others_go_on(loaded):
    with fixed_cost_engine(loaded) as engine:
        handle = engine.submit(request(100))
        handle.next_event(30)
        handle.pause()
        for _ in range(2):
            engine.generate(PROMPT, policy="full", max_tokens=20)
            delivered = events_so_far(handle)
        assert delivered == [], "the second request ran alone"
        assert engine.num_running == 1
        handle.resume()
        assert any(isinstance(event, Finished) for event in handle.events())


def test_a_pause_wakes_the_thread_because_another_may_start():
    wake_ups: list[None] = []
    GenerationHandle(request(), lambda: wake_ups.append(None), None).pause()
    assert wake_ups


def test_the_deadline_ends_a_request_even_while_it_is_paused(loaded):
    """Nothing wakes the engine's thread but the deadline itself."""
    now_s = [1000.0]
    with fixed_cost_engine(loaded, clock=lambda: now_s[0]) as engine:
        handle = engine.submit(request(100, deadline_s=1000.1))
        handle.pause()
        wait_until(lambda: engine.num_running == 1)
        now_s[0] = 1000.2
        with pytest.raises(DeadlineExceeded):
            list(handle.events())
        with pytest.raises(DeadlineExceeded):
            engine.submit(request(deadline_s=1000.2))


def test_the_queue_is_bounded(loaded):
    held = threading.Event()
    with fixed_cost_engine(loaded, max_queue=2, runner_of=HookedRunner) as engine:
        engine.runner.before["run"] = lambda *_: held.wait(30)
        handles = [engine.submit(request())]
        wait_until(lambda: engine.num_running == 1)
        handles += [engine.submit(request()), engine.submit(request())]
        with pytest.raises(Exhausted, match="already waiting") as caught:
            engine.submit(request())
        assert caught.value.reason == "QUEUE_FULL"
        assert caught.value.retry_after_s
        held.set()
        for handle in handles:
            assert any(isinstance(event, Finished) for event in handle.events())


def test_the_queue_is_bounded_by_the_prompts_tokens_too(loaded):
    length = 2 * len(PROMPT)
    slots = len(PROMPT) + 8
    with fixed_cost_engine(loaded, max_queue_tokens=length, kv_budget_bytes=slots * KV_TOKEN_BYTES) as engine:
        running = engine.submit(request())
        running.pause()
        wait_until(lambda: engine.num_running == 1)
        waiting = [engine.submit(request()) for _ in range(2)]
        with pytest.raises(Exhausted, match=f"with {length} prompt tokens are already") as caught:
            engine.submit(request())
        assert caught.value.reason == "QUEUE_FULL"
        running.resume()
        for handle in (running, *waiting):
            assert any(isinstance(event, Finished) for event in handle.events())


def test_a_deadline_too_short_for_the_prompt_is_refused_at_once(loaded):
    costs = FixedCosts(wide=((16, 4000.0),))
    with fixed_cost_engine(loaded, cost_meter=costs, clock=lambda: 0.0) as engine:
        engine.warm_up()
        soon = 3000.0
        with pytest.raises(DeadlineExceeded, match=r"at least 5000\.0 s") as caught:
            engine.submit(request(prompt_ids=(1,) * 40, deadline_s=soon))
        assert caught.value.reason == "DEADLINE_TOO_SHORT"
        engine.submit(request(prompt_ids=(1,) * 15, deadline_s=soon)).cancel()


def test_a_busy_moment_at_the_start_does_not_refuse_deadlines_for_ever(loaded):
    """Passes seemed to take 4000 s then. Nobody but requests of this kind asks."""
    now_s = [0.0]
    costs = FixedCosts(wide=((16, 4000.0),))
    asked = request(prompt_ids=(1,) * 40, deadline_s=3000.0)
    with fixed_cost_engine(loaded, cost_meter=costs, clock=lambda: now_s[0]) as engine:
        engine.warm_up()
        for _ in range(2):
            with pytest.raises(DeadlineExceeded):
                engine.submit(asked)
        now_s[0] = TRIAL_INTERVAL_S
        tried = engine.submit(asked)
        assert isinstance(list(tried.events())[-1], Finished)
        assert isinstance(list(engine.submit(asked).events())[-1], Finished)


def test_requests_wait_for_room_in_the_kv_budget(loaded):
    length = len(PROMPT) + 40
    with fixed_cost_engine(loaded, kv_budget_bytes=2 * length * KV_TOKEN_BYTES) as engine:
        assert engine.kv_token_bytes == KV_TOKEN_BYTES
        assert engine.kv_budget_bytes == 2 * length * KV_TOKEN_BYTES
        held = []
        for _ in range(2):
            held.append(engine.submit(request(40)))
            held[-1].pause()
        wait_until(lambda: engine.num_running == 2)
        third = engine.submit(request(1))
        engine.prepare(ScriptedLadder())  # type: ignore[arg-type]  # a turn of the engine's thread
        assert engine.num_waiting == 1  # two fill the budget, paused or not
        held[0].cancel()
        assert any(isinstance(event, Finished) for event in third.events())
        with pytest.raises(Exhausted, match="are there for all") as caught:
            engine.submit(request(100))
        assert caught.value.reason == "KV_BUDGET"


def test_no_more_run_at_once_than_asked(loaded):
    with fixed_cost_engine(loaded, max_running=2) as engine:
        handles = [engine.submit(request(60)) for _ in range(4)]
        seen = set()
        while not all(isinstance(h.next_event(30), Finished) for h in handles[:1]):
            seen.add((engine.num_running, engine.num_waiting))
        for handle in handles[1:]:
            list(handle.events())
    assert (2, 2) in seen
    assert max(running for running, _ in seen) == 2


@pytest.mark.full
def test_no_more_share_a_step_than_asked_after_all_have_paused(loaded, monkeypatch):
    """Each has paused when the next is admitted, and then all go on."""
    sizes = []
    step = Decoder.step

    def counted(decoder, batch):
        sizes.append(len(batch))
        return step(decoder, batch)

    monkeypatch.setattr(Decoder, "step", counted)
    with fixed_cost_engine(loaded, max_running=2) as engine:
        handles = []
        for _ in range(7):
            handles.append(engine.submit(request(100)))
            handles[-1].pause()
        wait_until(lambda: engine.num_running == 7)
        for handle in handles:
            handle.resume()
        answers = [
            [t.token_id for e in handle.events() if isinstance(e, TokenChunk) for t in e.tokens] for handle in handles
        ]
    assert max(sizes) == 2
    assert answers == [answers[0]] * 7


def test_a_failure_of_the_engine_itself_is_reported(loaded):
    told = threading.Event()
    engine = fixed_cost_engine(loaded, on_failure=told.set, runner_of=HookedRunner)

    def exits(*_: object) -> None:
        raise SystemExit  # unlike an Exception, this is not a request's failure

    engine.runner.before["run"] = exits
    with pytest.raises(Unavailable) as caught:
        list(engine.submit(request()).events())
    assert caught.value.reason == "ENGINE_FAILED"
    assert told.wait(60)
    for call in (lambda: engine.submit(request()), lambda: engine.prepare(ScriptedLadder())):  # type: ignore[arg-type]
        with pytest.raises(Unavailable) as refused:
            call()
        assert refused.value.reason == "ENGINE_FAILED"


def test_invalid_requests_are_refused_before_they_are_queued(loaded):
    other = ScriptedLadder(fingerprint="sha256:other")
    with fixed_cost_engine(loaded) as engine:
        with pytest.raises(PromptTooLong):
            engine.submit(request(prompt_ids=(1,) * loaded.context_length))
        for token in (-1, 2**70):
            stopping = StoppingParams(8, stop_token_ids=frozenset({token}))
            with pytest.raises(InvalidInput, match="stop_token_ids has token id") as caught:
                engine.submit(GenerationRequest(PROMPT, SamplingParams(min_tokens=2), stopping, FULL))
            assert caught.value.reason == "TOKEN_OUT_OF_RANGE"
        with pytest.raises(RouterMismatch):
            engine.submit(request(policy=DepthPolicy("exact")), other)  # type: ignore[arg-type]
        assert engine.num_waiting == engine.num_running == 0


@pytest.mark.parametrize("changes", [{"prompt_ids": (1, 2.5)}, {"prompt_ids": ("a",)}, {"deadline_s": float("nan")}])
def test_what_would_harm_others_is_no_request(changes):
    """A number that is no token would fail in a pass that others share; a deadline that compares with nothing would
    hide theirs."""
    with pytest.raises(InvalidInput):
        request(**changes)


def test_a_callers_later_changes_do_not_reach_the_engine(loaded):
    ids = list(PROMPT)
    asked = request(prompt_ids=ids)
    ids[:] = [10**6]
    assert asked.prompt_ids == PROMPT


def test_an_engine_that_cannot_get_ready_says_so(loaded):
    class Broken(FixedCosts):
        def measure_passes(self, *_: object, **__: object) -> NoReturn:
            raise ZeroDivisionError

    told = threading.Event()
    with fixed_cost_engine(loaded, cost_meter=Broken(), on_failure=told.set) as engine:
        for call in (engine.warm_up, lambda: engine.submit(request())):
            with pytest.raises(Unavailable) as caught:
                call()
            assert caught.value.reason == "ENGINE_FAILED"
        assert told.wait(60)


def test_a_ladder_of_its_own_that_cannot_be_bound_is_told_and_full_is_served(loaded):
    class Broken(ScriptedLadder):
        def bind(self, runner: object, beside: object = ()) -> "Broken":
            raise Corrupt("broken", reason="BROKEN")

    with fixed_cost_engine(loaded, Broken()) as engine:  # type: ignore[arg-type]
        for call in (engine.warm_up, lambda: engine.generate(PROMPT, max_tokens=4)):
            with pytest.raises(Corrupt) as caught:
                call()
            assert caught.value.reason == "BROKEN"
        assert len(engine.generate(PROMPT, policy="full", max_tokens=4).tokens) == 4


def test_the_whole_context_can_be_filled(loaded):
    right: list[int] = []
    ladder = ScriptedLadder(lambda context: (len(context) % VOCABULARY_SIZE, 0.9))
    room = loaded.context_length - len(PROMPT)
    with fixed_cost_engine(loaded, ladder) as engine:  # type: ignore[arg-type]
        right += engine.generate(PROMPT, policy="full", max_tokens=room).token_ids
        exact = engine.generate(PROMPT, policy=DepthPolicy("exact", max_drafts=6), max_tokens=room)
    assert len(right) == room
    assert list(exact.token_ids) == right


def test_closing_ends_queued_requests_and_refuses_new_ones(loaded):
    engine = fixed_cost_engine(loaded)
    handle = engine.submit(request(120))
    handle.pause()
    engine.close()
    with pytest.raises(Unavailable):
        list(handle.events())
    with pytest.raises(Unavailable):
        engine.submit(request())


def test_one_requests_failure_is_its_own(loaded):
    def broken(context: list[int]) -> tuple[int, float]:
        raise ZeroDivisionError

    with fixed_cost_engine(loaded) as engine:
        ladder: Any = ScriptedLadder(exits=broken, depths=(0,))
        bad = engine.submit(request(policy=DepthPolicy("exact")), ladder)
        with pytest.raises(Exception, match="failed inside the engine"):
            list(bad.events())
        assert len(engine.generate(PROMPT, policy="full", max_tokens=4).tokens) == 4


def test_a_second_engine_on_a_model_is_refused_until_the_first_has_ended(loaded):
    def failing(*_: object) -> NoReturn:
        raise UnsupportedModel("no runner")

    with pytest.raises(UnsupportedModel):
        fixed_cost_engine(loaded, runner_of=failing)
    with fixed_cost_engine(loaded) as first:
        for _ in range(2):
            with pytest.raises(PreconditionFailed) as caught:
                fixed_cost_engine(loaded)
            assert caught.value.reason == "MODEL_IN_USE"
        [expected] = {first.generate(PROMPT, policy="full", max_tokens=5).token_ids}
    fixed_cost_engine(loaded).warm_up()  # it is dropped, so the next one waits for its end
    with fixed_cost_engine(loaded) as second:
        assert second.generate(PROMPT, policy="full", max_tokens=5).token_ids == expected


def test_the_time_until_the_engine_is_ready_is_no_time_in_the_queue(loaded):
    submitted = threading.Event()

    class Waiting(FixedCosts):
        def measure_passes(self, *args, **options):
            submitted.wait(60)
            return super().measure_passes(*args, **options)

    with fixed_cost_engine(loaded, cost_meter=Waiting()) as engine:
        handle = engine.submit(request())
        handle.submitted_s -= 1000.0
        submitted.set()
        *_, finished = handle.events()
        assert finished.queue_s < 1000.0
        assert engine.statistics.queue_s.sum < 1000.0
