"""On a GPU: CUDA graphs over paged KV give what the model's own forward gives, and exact is full."""

from dataclasses import replace

import pytest
import torch

from shared.engine.ahead.decoder import AheadDecoder
from shared.engine.engine import Engine
from shared.engine.request.request import GenerationRequest, StoppingParams, TokenChunk
from shared.ladder.policy import DepthPolicy
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel, wrap_model
from shared.model.numerics import numerics_of
from shared.model.paged_runner import PagedRunner
from shared.model.ragged import RaggedSequence
from shared.model.recorder import CudaRecorder
from shared.model.runners import LayerCompiler
from shared.model.sampling import SamplingParams
from shared.ops.chains import ChainStart
from tests.chain_starts import begun
from tests.families import VOCABULARY_SIZE, build_family
from tests.fixed_costs import FixedCosts, fixed_cost_engine
from tests.random_ladder import random_ladder
from tests.scripted_ladder import ScriptedLadder

NUM_NEW = 20
PROMPTS = [(5, 17, 3, 44, 8), tuple(range(2, 40)), (9,)]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


# Of logits, relative to the largest. In bfloat16 what is rounded between a compiled layer's operations is a matter of
# taste.
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 0.4}


def on_gpu(family: str, dtype: torch.dtype) -> LoadedModel:
    return wrap_model(build_family(family).to("cuda", dtype), accelerate=True)


@pytest.fixture(params=["llama", "mistral-sliding", "gemma3-sliding"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return on_gpu(request.param, torch.bfloat16)


def captured(loaded: LoadedModel, *, compiled: bool = False) -> PagedRunner:
    runner = PagedRunner(
        loaded,
        kv_budget_bytes=1 << 24,
        recorder=CudaRecorder(loaded.device),
        transform=LayerCompiler() if compiled else None,
    )
    assert runner.records
    assert runner.compiles == compiled
    return runner


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma3-sliding"])
@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("compiled", [False, True])
def test_captured_passes_are_the_models_own(family, dtype, compiled):
    loaded = on_gpu(family, dtype)
    runner = captured(loaded, compiled=compiled)
    ids = torch.randint(2, VOCABULARY_SIZE, (1, 60), device="cuda")
    with torch.no_grad():
        expected = loaded.model(input_ids=ids, use_cache=False).logits.float()
    cache, at = runner.new_cache(60), 0
    for size in (9, 1, 30, 20):
        piece = ids[:, at : at + size]
        runner.run(piece.flip(1), cache, first=0, last=runner.num_layers, base=at)
        shallow = runner.run(piece, cache, first=0, last=2, base=at)
        deep = runner.run(piece, cache, first=2, last=runner.num_layers, base=at, hidden=shallow)
        logits, own = runner.logits(deep), expected[:, at : at + size]
        assert (logits - own).abs().max() <= CLOSE[dtype] * own.abs().max()
        at += size


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3-sliding"])
def test_exact_is_promised_where_products_are_neaps_own(family, compiled):
    model = build_family(family).to("cuda", torch.bfloat16)
    found = numerics_of(captured(wrap_model(model, accelerate=True, invariant=True), compiled=compiled))
    assert found.is_exact, found.why_not


def test_company_changes_no_bit_up_to_the_smallest_bucket(loaded):
    runner = captured(loaded)
    ids = [torch.tensor([prompt[:7]]) for prompt in PROMPTS]
    alone = [runner.run(row, runner.new_cache(9), first=0, last=runner.num_layers, base=0) for row in ids]
    sequences = [RaggedSequence(runner.new_cache(9), 0, row.shape[1]) for row in ids]
    together = runner.run_ragged(torch.cat(ids, 1), sequences, first=0, last=runner.num_layers)
    assert torch.equal(together, torch.cat(alone, 1))


def test_exact_is_full_alone_and_in_company(loaded):
    with Engine(loaded, kv_budget_bytes=1 << 24) as engine:
        assert isinstance(engine.runner, PagedRunner)
        full = {prompt: engine.generate(prompt, policy="full", max_tokens=NUM_NEW).token_ids for prompt in PROMPTS}

    def right(context: list[int]) -> tuple[int, float] | None:
        for prompt, answer in full.items():
            if tuple(context[: len(prompt)]) == prompt and len(context) % 4:
                place = len(context) - len(prompt)
                return ((*answer, 0)[min(place, NUM_NEW)] if len(context) % 4 < 3 else 3, 0.9)
        return None

    ladder = ScriptedLadder(right, lambda _: (4, 0.1), depths=(0, 2))
    with Engine(loaded, ladder, kv_budget_bytes=1 << 24) as engine:  # type: ignore[arg-type]
        for prompt, answer in full.items():
            exact = engine.generate(prompt, policy=DepthPolicy("exact", max_drafts=3), max_tokens=NUM_NEW)
            assert exact.token_ids == answer
            assert exact.stats.num_accepted > 0


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0, seed=4)], ids=["greedy", "drawn"])
def test_steps_launched_ahead_give_the_tokens_of_full_depth(loaded, sampling):
    """Drafts of tables and of a head, from the device alone; one request needs the host. All passes have the smallest
    size, in which company changes no bit."""
    meter = FixedCosts(wide=((16, 1.0), (24, 50.0), (256, 60.0)))
    stopping = StoppingParams(max_tokens=NUM_NEW, ignore_eos=True)
    rules = [sampling, sampling, replace(sampling, repetition_penalty=1.2)]
    ladder = random_ladder(loaded, 3, (0,), agreement=1.0)
    options = {"kv_budget_bytes": 1 << 24, "learned_bytes": 1 << 12, "cost_meter": meter}
    with fixed_cost_engine(loaded, ladder, **options) as engine:
        assert isinstance(engine._decoder, AheadDecoder)

        def answers(policy: str) -> list[list[int]]:
            requests = [
                GenerationRequest(prompt[:20] * 2, rule, stopping, DepthPolicy(policy))
                for prompt, rule in zip(PROMPTS, rules, strict=True)
            ]
            handles = [engine.submit(request) for request in requests]
            return [
                [token.token_id for event in handle.events() if isinstance(event, TokenChunk) for token in event.tokens]
                for handle in handles
            ]

        full = answers("full")
        assert [answers("exact") for _ in range(3)] == [full] * 3
        assert sum(engine.statistics.drafted.values()) > 0


def test_exact_is_full_whatever_random_exits_say(loaded):
    """A ladder's own heads and routers, asked over recorded passes."""
    ladder = random_ladder(loaded, 3, (0, 2, 3), agreement=1.0)
    with fixed_cost_engine(loaded, ladder, kv_budget_bytes=1 << 24) as engine:
        for prompt in PROMPTS:
            full = engine.generate(prompt, policy="full", max_tokens=NUM_NEW)
            policy = DepthPolicy("exact", max_drafts=3)
            exact = engine.generate(prompt, policy=policy, max_tokens=NUM_NEW)
            assert exact.token_ids == full.token_ids
            assert exact.stats.num_drafted > 0


def test_recorded_chains_are_those_that_run_step_by_step():
    """In every size of a recording; what a calibration replays is what a worker drafts."""
    loaded = on_gpu("llama", torch.bfloat16)
    ladder = random_ladder(loaded, 3, (0,))
    recorded, plain = ladder.bind(captured(loaded)), ladder.bind(ContiguousRunner(loaded))
    list(recorded.prepare())
    for count in (1, 2, 9, 70):
        begins = torch.randn(count, 3, loaded.hidden_size, device="cuda").unbind()
        starts = [ChainStart([4, 6][: 1 + i % 2], 0, 4, 1.0, 1.0, 0.0) for i in range(count)]
        found, expected = (bound.propose(0, begun(begins, starts)) for bound in (recorded, plain))
        # Only the first drafts: behind a near-tie the chains go apart.
        torch.testing.assert_close(found.probabilities[:, 0], expected.probabilities[:, 0], rtol=0, atol=1e-3)
        torch.testing.assert_close(found.outputs[:, 0], expected.outputs[:, 0], rtol=1e-3, atol=1e-3)
        assert found.lengths.tolist() == expected.lengths.tolist() == [4] * count
