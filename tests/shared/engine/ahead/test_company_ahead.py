"""What befalls one request on the device befalls no other: failures, ends in the middle of a step, too many at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shared.engine.ahead import decoder
from shared.engine.ahead.slots import SlotMemory
from shared.engine.engine import Engine
from shared.engine.request.request import Finished, GenerationRequest, StoppingParams, TokenChunk
from shared.errors import NeapError
from shared.ladder.policy import DepthPolicy
from shared.model.loaded import LoadedModel
from shared.model.sampling import SamplingParams
from tests.fixed_costs import fixed_cost_engine
from tests.paged import load_family, make_runner
from tests.random_ladder import random_ladder
from tests.tiers import tiered
from tests.waiting import wait_until

NEEDS_HOST = SamplingParams(repetition_penalty=1.3)
FULL, EXACT = DepthPolicy("full"), DepthPolicy("exact")


@pytest.fixture
def loaded() -> LoadedModel:
    torch.manual_seed(0)
    return load_family("llama")


def request(prompt: tuple[int, ...], count: int, policy: DepthPolicy = FULL, **options: Any) -> GenerationRequest:
    return GenerationRequest(
        prompt, stopping=StoppingParams(max_tokens=count, ignore_eos=True), policy=policy, **options
    )


def paged(loaded: LoadedModel, ladder: Any = None, **options: Any) -> Engine:
    options = {"kv_budget_bytes": 1 << 22, "runner_of": make_runner, "tries_promise": False, **options}
    return fixed_cost_engine(loaded, ladder, **options)


def tokens_of(events: list[Any]) -> list[int]:
    return [token.token_id for event in events if isinstance(event, TokenChunk) for token in event.tokens]


def submit(engine: Engine, asked: GenerationRequest, then: Callable[[list[Any]], object] = len) -> list[Any]:
    """Its events, as they come; `then` is called with them after each."""
    events: list[Any] = []

    def on_event(event: Any) -> None:
        events.append(event)
        then(events)

    engine.submit(asked, on_event=on_event)
    return events


def has_ended(events: list[Any]) -> bool:
    return bool(events) and events[-1] is None


def test_logits_that_are_not_finite_end_no_other_request(loaded: LoadedModel) -> None:
    ladder = random_ladder(loaded, 1, depths=(0,), agreement=0.5)
    sound = [request((5, 6, 7 + number), 20, EXACT) for number in range(3)]
    with paged(loaded, ladder) as engine:
        wanted = [list(engine.generate(each).token_ids) for each in sound]
        with torch.no_grad():
            loaded.model.get_input_embeddings().weight[3] = torch.nan
        company = [submit(engine, each) for each in sound]
        culprit = submit(engine, request((4, 3, 4), 20, EXACT))
        wait_until(lambda: all(map(has_ended, [*company, culprit])))
        assert [getattr(event, "reason", "") for event in culprit[-2:-1]] == ["NON_FINITE_LOGITS"]
        assert culprit.count(None) == 1
        assert sum(isinstance(event, NeapError) for event in culprit) == 1
        assert [tokens_of(events) for events in company] == wanted
        # Nor later ones, in whose steps its row is not used.
        assert [list(engine.generate(each).token_ids) for each in sound] == wanted


def test_a_failed_launch_fails_no_request_of_the_host(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request((8, 9, 10), 12, sampling=NEEDS_HOST)
    with fixed_cost_engine(loaded, tries_promise=False) as plain:
        wanted = list(plain.generate(asked).token_ids)
    with paged(loaded) as engine:
        engine.warm_up()
        send, counted = SlotMemory.send, iter(range(1, 100))

        def failing(self: SlotMemory, rows: Any, others: Any, size: int) -> None:
            if rows and others and next(counted) == 5:
                raise RuntimeError("a planted failure")
            send(self, rows, others, size)

        monkeypatch.setattr(SlotMemory, "send", failing)
        of_host, of_device = submit(engine, asked), submit(engine, request((5, 6, 7), 30))
        wait_until(lambda: has_ended(of_host) and has_ended(of_device))
        assert tokens_of(of_host) == wanted
        assert isinstance(of_host[-2], Finished)
        assert isinstance(of_device[-2], NeapError)
        assert of_device.count(None) == 1


@pytest.mark.parametrize("at", tiered(range(1, 6), {2}))
def test_an_answer_that_ends_when_another_needs_the_host_is_whole(loaded: LoadedModel, at: int) -> None:
    alone = request((5, 6, 7), 6)
    with paged(loaded) as engine:
        wanted = list(engine.generate(alone).token_ids)
        company: list[list[Any]] = []

        def then(events: list[Any]) -> None:
            if len(events) == at:
                company.append(submit(engine, request((8, 9), 4, sampling=NEEDS_HOST)))

        events = submit(engine, alone, then)
        wait_until(lambda: has_ended(events) and all(map(has_ended, company)))
        assert tokens_of(events) == wanted
        assert [type(event) for event in events[-2:]] == [Finished, type(None)]
        assert sum(isinstance(event, Finished) for event in events) == 1
        assert len(tokens_of(company[0])) == 4


@pytest.mark.full
def test_more_requests_than_a_turn_takes_take_turns(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "MAX_ROWS", 8)
    begun: list[int] = []
    ended: list[int] = []

    def noting(number: int) -> Callable[[list[Any]], None]:
        def note(events: list[Any]) -> None:
            if number not in begun and isinstance(events[0], TokenChunk):
                begun.append(number)
            if events[-1] is None:
                ended.append(len(begun))

        return note

    with paged(loaded, kv_budget_bytes=1 << 26, max_running=10, prefix_cache_bytes=0) as engine:
        engine.warm_up()
        all_events = [submit(engine, request((5, 6, 7 + number), 30), noting(number)) for number in range(10)]
        wait_until(lambda: all(map(has_ended, all_events)))
    assert ended[0] == 10, "none ended before the last had begun"


def test_counts_are_those_of_a_cpu(loaded: LoadedModel) -> None:
    found = []
    for options in ({"runner_of": make_runner, "kv_budget_bytes": 1 << 22}, {}):
        with fixed_cost_engine(loaded, tries_promise=False, prefix_cache_bytes=0, **options) as engine:
            depth = engine.generate(request((5, 6, 7), 6)).stats
            engine.generate(request((5,), 1))
            counts = engine.statistics
            found.append((
                depth, counts.num_requests, counts.num_generated_tokens, counts.num_layer_executions,
                counts.num_layer_executions_saved, counts.num_layer_executions_extra, counts.num_prompt_tokens,
            ))  # fmt: skip
    assert found[0] == found[1]
