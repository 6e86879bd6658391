"""A failure of one request's work ends that request alone, one of a shared pass ends those that shared it, and the
engine goes on."""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shared.engine import verification
from shared.engine.engine import Engine
from shared.engine.memory.prefixes import Prefixes
from shared.engine.request import answer as answer_module
from shared.engine.request.answer import Detokenizer
from shared.engine.request.request import Finished, GenerationRequest, StoppingParams, TokenChunk
from shared.engine.statistics import EngineStatistics
from shared.engine.step import Decoder
from shared.errors import Cancelled, Corrupt, Exhausted, NeapError, Unavailable
from shared.ladder.policy import DepthPolicy
from shared.model.loaded import LoadedModel, wrap_model
from shared.model.sampling import SamplingParams
from tests.fixed_costs import fixed_cost_engine
from tests.hooked_runner import HookedRunner
from tests.scripted_ladder import ScriptedLadder
from tests.tiers import tiered
from tests.waiting import wait_until
from tests.worker import build_model, build_tokenizer

FULL, EXACT = DepthPolicy("full"), DepthPolicy("exact")
NUM_TOKENS = 60
VICTIM = tuple(range(40, 61))
# Nobody else's request takes so many positions.
VICTIMS_SLOTS = len(VICTIM) + 50


def request(prompt: tuple[int, ...] = VICTIM, max_tokens: int = 50, **changes: Any):
    stopping = changes.pop("stopping", StoppingParams(max_tokens=max_tokens, ignore_eos=True))
    return GenerationRequest(prompt, **{"policy": FULL, "stopping": stopping, **changes})


NEIGHBOURS = (
    request((5, 17, 3), NUM_TOKENS),
    request((9, 8, 7, 6), NUM_TOKENS, sampling=SamplingParams(1.0, top_p=0.9, seed=3), logprobs=2),
    request((200, 201, 202, 200, 201), NUM_TOKENS, policy=EXACT),
)
NEIGHBOURS_LADDER = ScriptedLadder(lambda context: (context[-2], 0.9) if context[1:] else None)


def said(event: TokenChunk) -> list[Any]:
    """Its tokens without their exits, which depend on the time that steps take."""
    return [(token.token_id, token.logprob, token.alternatives) for token in event.tokens]


def collected(handle) -> tuple[list[Any], list[Any]]:
    """(tokens, all other events) of a handle, until the end."""
    tokens: list[Any] = []
    others: list[Any] = []
    while (event := handle.next_event(30)) is not None:
        if isinstance(event, TokenChunk):
            tokens += said(event)
        else:
            others.append(event)
    return tokens, others


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """A model that takes several sequences in one pass."""
    return wrap_model(build_model(), build_tokenizer(), model_id="tiny", accelerate=True)


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> list[Any]:
    """The answers to each neighbour and to the victim without a failure, run one after another."""
    with fixed_cost_engine(loaded) as engine:
        return [
            collected(engine.submit(asked, NEIGHBOURS_LADDER))[0]  # type: ignore[arg-type]
            for asked in (*NEIGHBOURS, request())
        ]


@dataclass
class Case:
    """`broken` prepares the failure and returns the victim's request and further arguments of `submit`."""

    broken: Callable[[Any, Engine, list[Any]], tuple[GenerationRequest, dict[str, Any]]]
    kind: type[BaseException] = NeapError
    reason: str = "INTERNAL"
    others: dict[str, Any] = field(default_factory=dict)


def fail(*_: object, **__: object) -> Any:
    raise ZeroDivisionError


def with_ladder(ladder: ScriptedLadder, **methods: Any):
    def broken(patch, engine, alone):
        for name, method in methods.items():
            setattr(ladder, name, method)
        return request(policy=EXACT), {"ladder": ladder}

    return broken


def with_error(error: BaseException, name: str):
    """The victim's cache cannot be made, or not be allocated."""

    def broken(patch, engine, alone):
        def failing(cache: Any) -> None:
            if VICTIMS_SLOTS in (cache, getattr(cache, "capacity", None)):
                raise error

        engine.runner.before[name] = failing
        return request(), {}

    return broken


def no_text(patch, engine, alone):
    others = {token for answer in alone[:3] for token, *_ in answer}
    wrong = next(token for token, *_ in alone[3] if token not in others)
    push_all = Detokenizer.push_all

    def failing(self, ids):
        return fail() if wrong in ids else push_all(self, ids)

    patch.setattr(Detokenizer, "push_all", failing)
    return request(), {}


def no_stop_strings(patch, engine, alone):
    class Failing(answer_module.StopStrings):
        def __init__(self, stops):
            super().__init__(stops)
            self.push = fail if stops else self.push

    patch.setattr(answer_module, "StopStrings", Failing)
    return request(stopping=StoppingParams(max_tokens=50, stop_strings=("no such",))), {}


def no_logprobs(patch, engine, alone):
    from_row = verification.logprobs_from_row
    patch.setattr(verification, "logprobs_from_row", lambda row: fail() if len(row) == 1 + 2 * 7 else from_row(row))
    return request(logprobs=7), {}


OWN = {
    "bind": Case(with_ladder(ScriptedLadder(), bind=fail)),
    "bind by a NeapError": Case(
        with_ladder(ScriptedLadder(), bind=lambda runner, beside: throw(Corrupt("bad", reason="BAD"))), Corrupt, "BAD"
    ),
    "a new sequence": Case(with_ladder(ScriptedLadder(), tables=fail)),
    "what tables are told": Case(with_ladder(ScriptedLadder(), tables=lambda *_: SimpleNamespace(append=fail))),
    "drafting no token": Case(with_ladder(ScriptedLadder(lambda context: (10**6, 0.9))), Corrupt, "DRAFT_OUT_OF_RANGE"),
    "asking an exit": Case(with_ladder(ScriptedLadder(exits=lambda context: fail(), depths=(0, 1)))),
    "making a cache": Case(with_error(MemoryError(), "new_cache"), Exhausted, "OUT_OF_MEMORY"),
    "making a cache on a GPU": Case(
        with_error(torch.OutOfMemoryError("CUDA"), "new_cache"), Exhausted, "OUT_OF_MEMORY"
    ),
    "allocating a cache": Case(
        with_error(RuntimeError("DefaultCPUAllocator: can't"), "reserve"), Exhausted, "OUT_OF_MEMORY"
    ),
    "text": Case(no_text),
    "stop strings": Case(no_stop_strings),
    "log-probabilities": Case(no_logprobs),
}


def throw(error: Exception) -> Any:
    raise error


def start_neighbours(engine: Engine) -> list[Any]:
    handles = [engine.submit(asked, NEIGHBOURS_LADDER) for asked in NEIGHBOURS]  # type: ignore[arg-type]
    wait_until(lambda: engine.num_running == len(handles))
    return handles


def check_nothing_is_left(engine: Engine) -> None:
    wait_until(lambda: engine.num_running == 0)
    assert engine.kv_usage_ratio == 0
    counts = engine.statistics
    total = engine.loaded.num_layers * (counts.num_generated_tokens - counts.num_requests)
    assert counts.num_generated_tokens == counts.exits.total()
    assert counts.num_layer_executions == (
        total - counts.num_layer_executions_saved + counts.num_layer_executions_extra
    )


@pytest.mark.parametrize("name", tiered(OWN, {"bind", "drafting no token", "making a cache"}))
def test_a_requests_own_failure_ends_it_alone(loaded, alone, monkeypatch, name):
    case = OWN[name]
    with fixed_cost_engine(loaded, runner_of=HookedRunner) as engine:
        engine.warm_up()
        asked, options = case.broken(monkeypatch, engine, alone)
        neighbours = start_neighbours(engine)
        tokens, [error] = collected(engine.submit(asked, **options))
        assert type(error) is case.kind
        assert error.reason == case.reason
        assert error.__traceback__ is None, "its frames hold the caches of others"
        assert tokens == alone[3][: len(tokens)]
        for handle, expected in zip(neighbours, alone, strict=False):
            assert collected(handle)[0] == expected
        check_nothing_is_left(engine)
        monkeypatch.undo()
        engine.runner.before.clear()
        assert collected(engine.submit(request()))[0] == alone[3]


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_callback_that_raises_cancels_its_own_request(loaded, alone, error):
    seen: list[object] = []

    def on_event(event: object) -> None:
        seen.append(event)
        raise error

    with fixed_cost_engine(loaded) as engine:
        neighbours = start_neighbours(engine)
        engine.submit(request(), on_event=on_event)
        for handle, expected in zip(neighbours, alone, strict=False):
            assert collected(handle)[0] == expected
        check_nothing_is_left(engine)
    assert isinstance(seen[-2], Cancelled)
    assert seen[-1] is None


def test_a_request_that_cannot_be_closed_fails_beside_one_that_ends(loaded, alone, monkeypatch):
    """In one step the first finishes and the second fails while its last text is decoded."""
    made: list[Any] = []
    step = threading.Event()

    class Failing(answer_module.Detokenizer):
        """The third one, in the order in which requests are submitted, is the victim's."""

        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

        def flush(self):
            return fail() if self is made[2] else super().flush()

    monkeypatch.setattr(answer_module, "Detokenizer", Failing)
    with fixed_cost_engine(loaded, runner_of=HookedRunner) as engine:
        engine.runner.before["run"] = lambda *_: step.wait(30)
        engine.submit(request((7,), 1))  # holds the thread until all three are there
        asked = [request((5, 17, 3), 8), request(VICTIM, 8), request((9, 8, 7, 6), 8)]
        handles = [engine.submit(one) for one in asked]
        step.set()
        first, failed, last = (collected(handle) for handle in handles)
        assert first[0] == alone[0][:8]
        assert failed[0] == alone[3][:8]
        assert [type(event) for event in failed[1]] == [NeapError]
        assert [type(event) for event in first[1] + last[1]] == [Finished] * 2
        check_nothing_is_left(engine)


@pytest.mark.parametrize(("owner", "name"), [(EngineStatistics, "record_step"), (Prefixes, "insert")])
def test_an_error_in_counts_or_reuse_leaves_answers_complete(loaded, alone, monkeypatch, owner, name):
    with fixed_cost_engine(loaded) as engine:
        monkeypatch.setattr(owner, name, fail)
        for handle, expected in zip(start_neighbours(engine), alone, strict=False):
            tokens, [finished] = collected(handle)
            assert tokens == expected
            assert isinstance(finished, Finished)
        assert engine.kv_usage_ratio == 0


@pytest.mark.parametrize("part", ["run_ragged", "logits"])
def test_a_failed_pass_ends_those_that_shared_it(loaded, alone, part):
    with fixed_cost_engine(loaded, runner_of=HookedRunner) as engine:
        kept = collected(engine.submit(request(tuple(range(100, 130)), 4)))[0]
        outsider = engine.submit(request(max_tokens=1500))
        tokens_of_outsider = said(outsider.next_event(30))
        outsider.pause()
        engine.prepare(NEIGHBOURS_LADDER)  # type: ignore[arg-type]
        num_cached = engine.num_cached_tokens
        shared = []

        def failing(*args: Any) -> None:
            if engine.num_running == 4:
                shared.append(args)
                if len(shared) == 5:
                    raise RuntimeError("a kernel broke")

        engine.runner.before[part] = failing
        handles = [engine.submit(asked, NEIGHBOURS_LADDER) for asked in NEIGHBOURS]  # type: ignore[arg-type]
        for handle, expected in zip(handles, alone, strict=False):
            tokens, [error] = collected(handle)
            assert tokens == expected[: len(tokens)]
            assert type(error) is NeapError
        assert engine.num_cached_tokens == num_cached, "nothing of a failed pass is reused"
        outsider.resume()
        while len(tokens_of_outsider) < len(alone[3]):
            tokens_of_outsider += said(outsider.next_event(30))
        assert tokens_of_outsider[: len(alone[3])] == alone[3]
        outsider.cancel()
        wait_until(lambda: engine.num_running == 0)
        for handle, expected in zip(start_neighbours(engine), alone, strict=False):
            assert collected(handle)[0] == expected
        tokens, [finished] = collected(engine.submit(request(tuple(range(100, 130)), 4)))
        assert tokens == kept
        assert finished.num_cached_tokens > 0
        check_nothing_is_left(engine)


SOUND_TOKENS = 17


def spoil(patch: pytest.MonkeyPatch, value: float, rows: Any) -> None:
    """Sets logits of the victim: the rows that choose the tokens of its answer from SOUND_TOKENS on."""
    read_logits = Decoder._logits

    def spoiled(decoder: Decoder, parts: Any, states: Any) -> Any:
        logits, row = read_logits(decoder, parts, states), 0
        if logits is None:
            return None
        logits = logits.clone()
        for part in parts:
            sequence = part.sequence
            for place in range(sequence.num_generated, sequence.num_generated + part.num_logits):
                if sequence.request.prompt_ids == VICTIM and place >= SOUND_TOKENS:
                    logits[row, rows] = value
                row += 1
        return logits

    patch.setattr(Decoder, "_logits", spoiled)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"logprobs": 2},
        {"policy": EXACT},
        {"policy": EXACT, "logprobs": 2, "sampling": SamplingParams(1.0, seed=5)},
        {"policy": DepthPolicy("relaxed", threshold=1.0, margin=0.5)},
        {"sampling": SamplingParams(0.7, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1)},
    ],
    ids=str,
)
def test_logits_that_are_not_finite_end_their_own_request(loaded, alone, changes, value):
    """After the tokens before them, which may be drafts that the same pass accepts."""
    asked = request(**changes)
    with fixed_cost_engine(loaded) as engine, pytest.MonkeyPatch.context() as patch:
        whole = collected(engine.submit(replace(asked, policy=FULL)))[0]
        right = [token for token, *_ in whole]

        def oracle(context: list[int]) -> tuple[int, float] | None:
            place = len(context) - len(VICTIM)
            return (right[place], 0.9) if 0 <= place < len(right) and place % 5 else None

        spoil(patch, value, slice(None) if value == -math.inf else 7)
        neighbours = start_neighbours(engine)
        tokens, [error] = collected(engine.submit(asked, ScriptedLadder(oracle)))  # type: ignore[arg-type]
        assert (type(error), error.reason) == (NeapError, "NON_FINITE_LOGITS")
        assert tokens == whole[:SOUND_TOKENS]
        for handle, expected in zip(neighbours, alone, strict=False):
            assert collected(handle)[0] == expected
        check_nothing_is_left(engine)
        patch.undo()
        assert collected(engine.submit(replace(asked, policy=FULL)))[0] == whole


def test_logits_after_the_end_of_an_answer_need_not_be_finite(loaded, alone, monkeypatch):
    with fixed_cost_engine(loaded) as engine:
        spoil(monkeypatch, math.nan, slice(None))
        tokens, [finished] = collected(engine.submit(request(max_tokens=SOUND_TOKENS)))
        assert isinstance(finished, Finished)
        assert tokens == alone[3][:SOUND_TOKENS]


def test_an_engine_ends_if_its_model_cannot_run_any_more(loaded):
    told = threading.Event()
    with fixed_cost_engine(loaded, on_failure=told.set, runner_of=HookedRunner) as engine:
        engine.warm_up()
        paused = engine.submit(request(max_tokens=1500))
        paused.next_event(30)
        paused.pause()
        collected(engine.submit(request((5, 6), 1)))  # its last step is over
        engine.runner.before["run"] = fail
        assert type(collected(engine.submit(request((5, 6))))[1][0]) is NeapError
        assert told.wait(60)
        [error] = collected(paused)[1]
        assert (type(error), error.reason) == (Unavailable, "ENGINE_FAILED")
        with pytest.raises(Unavailable):
            engine.submit(request())
