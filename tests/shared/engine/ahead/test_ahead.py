"""Steps launched one ahead of the host give the tokens of steps that wait, whatever the device does late, and whatever
ends, is put back or needs the host in between."""

import gc
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from shared.engine.ahead import ahead
from shared.engine.ahead.ahead import Ahead
from shared.engine.ahead.decoder import AheadDecoder, make_decoder
from shared.engine.ahead.slots import SlotMemory
from shared.engine.ahead.worth import Worth
from shared.engine.drafting.drafter import Drafter
from shared.engine.drafting.pass_costs import PassCosts
from shared.engine.engine import Engine
from shared.engine.memory.prefixes import Prefixes
from shared.engine.request.request import Finished, GenerationRequest, StoppingParams, TokenChunk
from shared.errors import Cancelled, NeapError
from shared.ladder.policy import DepthPolicy
from shared.ladder.table_confidence import SIZES, TableConfidence
from shared.model.loaded import LoadedModel
from shared.model.paged_runner import PagedRunner
from shared.model.sampling import SamplingParams
from tests.families import VOCABULARY_SIZE
from tests.fixed_costs import fixed_cost_engine
from tests.late_device import LateDevice, late
from tests.paged import block_bytes, load_family, make_runner
from tests.random_ladder import random_ladder
from tests.tiers import tiered

NUM_NEW, OURS = 12, f"{Path(__file__).parents[4] / 'shared'}/"
SURE = TableConfidence(2.0, [[0.0] * size for size in SIZES])


def ladder_of(loaded: LoadedModel, seed: int) -> Any:
    """Tables that are sure, and a head that is right by chance."""
    ladder = random_ladder(loaded, seed, depths=(0,), agreement=0.5)
    object.__setattr__(ladder, "lookup_confidence", SURE)
    object.__setattr__(ladder, "ngram_confidence", SURE)
    return ladder


@dataclass
class Case:
    """A request of a random run."""

    prompt: tuple[int, ...]
    policy: DepthPolicy
    stopping: StoppingParams
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    cancel_after: int | None = None

    @property
    def request(self) -> GenerationRequest:
        return GenerationRequest(
            self.prompt,
            self.sampling,
            self.stopping,
            self.policy,
            priority=self.priority,
        )


def random_case(draw: random.Random, stem: tuple[int, ...]) -> Case:
    tokens = range(2, VOCABULARY_SIZE)
    # Repetitions, so that tables find something, and common beginnings, so that prefixes are shared.
    part = draw.choices(tokens, k=draw.choice([1, 2, 7]))
    prompt = (*stem[: draw.choice([0, 0, 24])], *part * draw.choice([1, 3]))
    ends = frozenset(draw.choices(tokens, k=draw.choice([0, 4, 12])))
    stopping = StoppingParams(
        max_tokens=draw.choice([1, 2, 5, NUM_NEW]), stop_token_ids=ends, ignore_eos=draw.random() < 0.5
    )
    temperature = draw.choice([0.0, 0.0, 0.3, 1.0])
    rule = draw.choice([{}] * 8 + [{"min_p": 0.05}, {"repetition_penalty": 1.3}])
    sampling = SamplingParams(temperature, seed=draw.getrandbits(64), **rule)
    policy = DepthPolicy(draw.choice(["full", "exact", "exact", "exact"]))
    cancel_after = draw.choice([None, None, None, 1, 3])
    return Case(prompt, policy, stopping, sampling, draw.choice([0, 0, 0, -1]), cancel_after)


def answer(engine: Engine, handle: Any, cancel_after: int | None) -> tuple[list[int], Any]:
    tokens: list[int] = []
    last = None
    while (event := handle.next_event(60)) is not None:
        last = event
        if isinstance(event, TokenChunk):
            tokens += [token.token_id for token in event.tokens]
            if cancel_after is not None and len(tokens) >= cancel_after:
                handle.cancel()
    return tokens, last


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    torch.manual_seed(0)
    return load_family("llama")


def run_random(loaded: LoadedModel, seed: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    draw = random.Random(seed)
    stem = tuple(draw.choices(range(2, VOCABULARY_SIZE), k=40))
    cases = [random_case(draw, stem) for _ in range(draw.choice([1, 3, 8]))]
    ladders = [ladder_of(loaded, seed), ladder_of(loaded, seed + 1)]
    with fixed_cost_engine(loaded, tries_promise=False) as plain:
        wanted = [
            plain.generate(GenerationRequest(case.prompt, case.sampling, case.stopping, DepthPolicy("full"))).token_ids
            for case in cases
        ]
    device = LateDevice(seed)
    with late(device, monkeypatch):
        budget = 40 * block_bytes(loaded)
        with fixed_cost_engine(
            loaded,
            ladders[0],
            tries_promise=False,
            max_running=draw.choice([2, 16]),
            kv_budget_bytes=budget,
            prefix_cache_bytes=draw.choice([0, budget // 3]),
            learned_bytes=1 << 12,
            runner_of=lambda model, budget: PagedRunner(model, kv_budget_bytes=budget, recorder=device),
        ) as engine:
            assert isinstance(engine._decoder, AheadDecoder)
            handles = [engine.submit(case.request, draw.choice(ladders)) for case in cases]
            for case, handle, tokens in zip(cases, handles, wanted, strict=True):
                found, last = answer(engine, handle, case.cancel_after)
                if isinstance(last, Cancelled):
                    assert tuple(found) == tokens[: len(found)]
                else:
                    assert isinstance(last, Finished), last
                    assert tuple(found) == tokens
            statistics = engine.statistics
            device.counts["drafted"] = sum(statistics.drafted.values())
            device.counts["accepted"] = sum(statistics.accepted.values())
    return device.counts


@pytest.mark.parametrize("seed", tiered(range(60), {0}))
def test_random_requests_get_the_tokens_of_full_depth(
    loaded: LoadedModel, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_random(loaded, seed, monkeypatch)


@pytest.mark.parametrize("count", tiered([1, 5, 20], {5}))
def test_a_step_is_three_replays_and_two_copies_and_waits_only_for_the_step_before(
    loaded: LoadedModel, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = LateDevice(count)
    steps: list[Counter[str]] = []
    with late(device, monkeypatch):
        step_ahead = Ahead.launch

        def launch(self: Ahead, decoding: Any, *arguments: Any) -> Any:
            before, are_there = device.counts.copy(), all(each in self._places for each in decoding)
            found = step_ahead(self, decoding, *arguments)
            # Those that begin are copied, too.
            steps.extend([device.counts - before] * are_there)
            return found

        monkeypatch.setattr(Ahead, "launch", launch)
        with fixed_cost_engine(
            loaded,
            ladder_of(loaded, 1),
            tries_promise=False,
            max_running=32,
            prefix_cache_bytes=0,
            runner_of=lambda model, _: PagedRunner(model, kv_budget_bytes=1 << 24, recorder=device),
        ) as engine:
            request = GenerationRequest((5, 6, 7), stopping=StoppingParams(max_tokens=30, ignore_eos=True))
            for each in [engine.submit(request) for _ in range(count)]:
                answer(engine, each, None)
    assert len(steps) > 10
    for step in steps:
        assert step["replays"] <= 3
        assert step["copies"] == 2
        assert step["waits"] == 0


@pytest.mark.full
def test_paused_requests_make_room_on_the_device(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests have begun than there are slots, because their clients have stopped reading."""
    monkeypatch.setattr(ahead, "MOST_ROWS", 4)
    prompts = [(5, 6, 7 + number) * 3 for number in range(9)]
    stopping = StoppingParams(max_tokens=NUM_NEW, ignore_eos=True)
    with fixed_cost_engine(loaded, tries_promise=False) as plain:
        wanted = [
            plain.generate(GenerationRequest(prompt, stopping=stopping, policy=DepthPolicy("full"))).token_ids
            for prompt in prompts
        ]
    with fixed_cost_engine(
        loaded, ladder_of(loaded, 2), tries_promise=False, max_running=2, kv_budget_bytes=1 << 24, runner_of=make_runner
    ) as engine:
        begun = []
        for prompt in prompts:
            handle = engine.submit(GenerationRequest(prompt, stopping=stopping))
            first = handle.next_event(60)
            assert isinstance(first, TokenChunk)
            handle.pause()
            begun.append((handle, [token.token_id for token in first.tokens]))
        for handle, _ in begun:
            handle.resume()
        assert [tuple(tokens + answer(engine, handle, None)[0]) for handle, tokens in begun] == wanted
        counts = engine.statistics
    # The prompt's pass gives a token of each, also of those that got another slot after it.
    num_passes = len(prompts) * (NUM_NEW - 1) - counts.accepted.total()
    assert counts.num_layer_executions == loaded.num_layers * num_passes


@pytest.mark.full
def test_more_than_a_pass_holds(loaded: LoadedModel) -> None:
    """Many requests that need the host, whose drafts fill a pass of their own, beside some that do not."""
    draw = random.Random(8)
    draws, penalised = SamplingParams(1.0, seed=3), SamplingParams(repetition_penalty=1.01)
    prompts = [tuple(draw.choices(range(2, 6), k=9) * 2) for _ in range(36)]
    stopping = StoppingParams(max_tokens=NUM_NEW, ignore_eos=True)
    rules = [draws if number % 6 == 0 else penalised for number in range(len(prompts))]
    with fixed_cost_engine(loaded, tries_promise=False) as plain:
        wanted = [
            plain.generate(GenerationRequest(prompt, rule, stopping, DepthPolicy("full"))).token_ids
            for prompt, rule in zip(prompts, rules, strict=True)
        ]
    with fixed_cost_engine(
        loaded,
        ladder_of(loaded, 2),
        tries_promise=False,
        max_running=40,
        kv_budget_bytes=1 << 24,
        runner_of=make_runner,
    ) as engine:
        policy = DepthPolicy("exact", max_drafts=8)
        handles = [
            engine.submit(GenerationRequest(prompt, rule, stopping, DepthPolicy("exact") if rule is draws else policy))
            for prompt, rule in zip(prompts, rules, strict=True)
        ]
        assert [tuple(answer(engine, handle, None)[0]) for handle in handles] == wanted


def test_logits_that_are_not_finite_end_their_request() -> None:
    loaded = load_family("llama")
    with fixed_cost_engine(loaded, tries_promise=False, kv_budget_bytes=1 << 22, runner_of=make_runner) as engine:
        engine.warm_up()
        with torch.no_grad():
            loaded.model.get_output_embeddings().weight[5, 0] = torch.nan
        for sampling in (SamplingParams(), SamplingParams(1.0)):
            with pytest.raises(NeapError) as caught:
                engine.generate(GenerationRequest((4, 5, 6), sampling))
            assert caught.value.reason == "NON_FINITE_LOGITS"


def test_a_step_that_cannot_be_launched_fails_its_requests_alone(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = GenerationRequest((4, 5, 6), stopping=StoppingParams(max_tokens=NUM_NEW, ignore_eos=True))
    with fixed_cost_engine(loaded, tries_promise=False, kv_budget_bytes=1 << 22, runner_of=make_runner) as engine:
        wanted = engine.generate(request).token_ids
        send, calls = SlotMemory.send, iter([False, False, True])

        def failing(self: SlotMemory, *arguments: Any, **named: Any) -> None:
            if next(calls, False):
                raise RuntimeError("a planted failure")
            send(self, *arguments, **named)

        monkeypatch.setattr(SlotMemory, "send", failing)
        with pytest.raises(NeapError):
            engine.generate(request)
        assert engine.generate(request).token_ids == wanted


def test_a_plan_drafts_only_what_pays() -> None:
    worth, sizes = Worth(), (16, 32, 64)

    def flat(_: int) -> float:
        return 1.0

    assert worth.choose(sizes, 1, 1, 0, 64, flat, 0.0) == (16, True)  # nothing is known yet
    for _ in range(30):
        worth.record([0.9, 0.8, 0.7, 0.0], 1)
    assert worth.gain(3) == pytest.approx(2.4)
    assert worth.gain(1.5) == pytest.approx(1.3)
    assert worth.choose(sizes, 1, 1, 0, 64, flat, 0.1) == (16, True)
    assert worth.choose(sizes, 1, 1, 0, 64, flat, 2.5) == (16, False)
    assert worth.choose(sizes, 16, 16, 0, 64, flat, 0.0) == (64, True)
    assert worth.choose(sizes, 16, 0, 4, 64, flat, 0.0) == (32, False)
    assert worth.choose(sizes, 16, 16, 0, 32, flat, 0.0) == (32, True)
    assert worth.choose(sizes, 16, 16, 20, 16, flat, 0.0) == (64, False)
    for _ in range(200):
        worth.record([0.01], 1)
    tried = [worth.choose(sizes, 1, 1, 0, 64, flat, 0.5)[1] for _ in range(130)]
    assert sum(tried) == 2  # what is known gets old


def test_a_further_request_takes_few_python_calls_and_objects_of_a_step(loaded: LoadedModel) -> None:
    """And a further token none: what a step does for each of its tokens is done for all of them at once."""
    found, made = [], []
    for count in (4, 12):  # in a pass of one size
        decoder = make_decoder(make_runner(loaded), Prefixes(0), None)
        list(decoder.prepare(lambda work: 1.0))
        drafter = Drafter(decoder.runner, PassCosts((1.0,) * 9))
        stopping = StoppingParams(max_tokens=30, ignore_eos=True)
        requests = [GenerationRequest((5, 6, 7 + number), stopping=stopping) for number in range(count)]
        sequences = [decoder.admit(request, drafter) for request in requests]
        for _ in range(6):
            decoder.turn(sequences)
        assert all(sequence.place and sequence.num_generated > 1 for sequence in sequences)
        calls: list[str] = []

        def hook(frame: FrameType, event: str, _: Any, calls: list[str] = calls) -> None:
            if event == "call" and frame.f_code.co_filename.startswith((OURS, "<string>")):
                calls.append(frame.f_code.co_qualname)

        sys.setprofile(hook)
        try:
            for _ in range(4):
                decoder.turn(sequences)
        finally:
            sys.setprofile(None)
        found.append(Counter(calls))
        gc.disable()
        try:
            before = {id(each) for each in gc.get_objects()}
            results = decoder.turn(sequences)
            made.append(Counter(type(each).__name__ for each in gc.get_objects() if id(each) not in before))
        finally:
            gc.enable()
        assert all(chunk.token_ids for _, chunks in results for chunk in chunks)
    few, many = found
    assert few["Ahead.handle"] == many["Ahead.handle"] == 4
    assert (many.total() - few.total()) / (4 * 8) <= 5, (many - few).most_common(20)
    # A chunk, lists of its texts, token ids and exits, one of chunks, and what says whose they are.
    further = made[1] - made[0]
    assert (further["TokenChunk"], made[1]["GeneratedToken"]) == (8, 0)
    assert further["list"] <= 4 * 8
    assert further["tuple"] <= 2 * 8
