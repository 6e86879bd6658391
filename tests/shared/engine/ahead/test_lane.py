"""Long prompts are read in chunks on a grid, beside requests that decode, and get the tokens of full depth."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shared.engine.ahead.ahead import Ahead
from shared.engine.ahead.decoder import AheadDecoder
from shared.engine.ahead.lane import CHUNK_S, PromptLane
from shared.engine.drafting.pass_costs import PassCosts
from shared.engine.engine import Engine
from shared.engine.request.admission import PrefillRate
from shared.engine.request.request import Finished, GenerationRequest, StoppingParams, TokenChunk
from shared.errors import Cancelled
from shared.ladder.policy import DepthPolicy
from shared.model import paged_runner
from shared.model.loaded import LoadedModel, wrap_model
from shared.model.paged_runner import BUCKETS, PagedRunner
from shared.model.runner import Runner
from shared.model.sampling import SamplingParams
from tests.families import VOCABULARY_SIZE, build_family
from tests.fixed_costs import FixedCosts, fixed_cost_engine
from tests.late_device import LateDevice, late
from tests.paged import make_runner
from tests.shared.engine.ahead.test_ahead import answer, ladder_of

SIZE = 64
NUM_NEW = 6


def with_context(length: int) -> LoadedModel:
    torch.manual_seed(0)
    model = build_family("llama")
    model.config.pad_token_id, model.config.max_position_embeddings = None, length
    return wrap_model(model)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return with_context(1024)


def prompt(length: int, seed: int) -> tuple[int, ...]:
    drawn = torch.randint(2, VOCABULARY_SIZE, (length,), generator=torch.Generator().manual_seed(seed))
    return tuple(drawn.tolist())


def request(
    length: int, seed: int, sampling: SamplingParams | None = None, num_new: int = NUM_NEW, **policy: Any
) -> Any:
    stopping = StoppingParams(max_tokens=num_new, ignore_eos=True)
    return GenerationRequest(prompt(length, seed), sampling or SamplingParams(), stopping, DepthPolicy(**policy))


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Chunks that were read: size, first position, number of tokens."""
    monkeypatch.setattr(paged_runner, "LANE_SIZES", (32, SIZE))
    found: list[tuple[int, int, int]] = []
    read = PagedRunner.read

    def counted(self: PagedRunner, size: int, tokens: Sequence[int], cache: Any, base: int) -> None:
        if cache is not None:
            found.append((size, base, len(tokens)))
        read(self, size, tokens, cache, base)

    monkeypatch.setattr(PagedRunner, "read", counted)
    return found


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1])
def test_long_prompts_get_the_tokens_of_full_depth(
    loaded: LoadedModel, seed: int, chunks: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the device serves, and those that need the host; and one that begins as another one does."""
    penalised = SamplingParams(repetition_penalty=1.2)
    requests = [request(700, 1, name="exact"), request(40, 2, name="exact"), request(321, 3, penalised, name="exact"),
                request(257, 4, SamplingParams(1.0, seed=5), name="full"), request(390, 1, name="exact")]  # fmt: skip
    with fixed_cost_engine(loaded, tries_promise=False) as plain:
        wanted = [
            plain.generate(
                GenerationRequest(each.prompt_ids, each.sampling, each.stopping, DepthPolicy("full"))
            ).token_ids
            for each in requests
        ]
    device = LateDevice(seed)
    with (
        late(device, monkeypatch),
        fixed_cost_engine(
            loaded,
            ladder_of(loaded, seed),
            tries_promise=False,
            kv_budget_bytes=1 << 24,
            prefix_cache_bytes=1 << 22,
            runner_of=lambda model, budget: PagedRunner(model, kv_budget_bytes=budget, recorder=device),
        ) as engine,
    ):
        assert isinstance(engine._decoder, AheadDecoder)
        handles = [engine.submit(each) for each in requests]
        assert [tuple(answer(engine, handle, None)[0]) for handle in handles] == wanted
        # Again: the prompts are there already, but for their last tokens.
        num_chunks = len(chunks)
        assert tuple(answer(engine, engine.submit(requests[0]), None)[0]) == wanted[0]
        assert len(chunks) == num_chunks
    assert {size for size, *_ in chunks} == {SIZE}
    lengths = {len(each.prompt_ids) for each in requests}
    for _, base, count in chunks:
        assert (base + count) % SIZE == 0 or base + count + 1 in lengths
    # One is short enough for a pass of requests, and one is copied from another.
    assert sum(base == 0 for _, base, _ in chunks) == 2
    assert max(base + count for _, base, count in chunks) >= 700 - BUCKETS[-1]


class Metered(FixedCosts):
    """A chunk takes as long as four passes."""

    def measure_passes(self, runner: Runner, *, between: Callable[[], None] = lambda: None) -> PassCosts:
        return PassCosts((0.005,) * 9, wide=((16, 0.005), (BUCKETS[-1], 0.005)))

    def seconds(self, work: Callable[[], None]) -> float:
        return 0.02


def engine_of(loaded: LoadedModel, **options: Any) -> Engine:
    settings = {"tries_promise": False, "kv_budget_bytes": 1 << 24, "prefix_cache_bytes": 0, "runner_of": make_runner}
    return fixed_cost_engine(loaded, **{**settings, "cost_meter": Metered(), **options})


@pytest.mark.full
def test_prompts_have_half_of_the_time_beside_requests_that_decode(
    loaded: LoadedModel, chunks: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[int, bool]] = []  # requests that decode, and whether there is a chunk
    launch = Ahead.launch

    def counted(self: Ahead, decoding: Any, parts: Any, num_read: int, chunk: Any = None) -> Any:
        steps.append((len(decoding), chunk is not None))
        return launch(self, decoding, parts, num_read, chunk)

    monkeypatch.setattr(Ahead, "launch", counted)
    with engine_of(loaded) as engine:
        streaming = engine.submit(request(5, 1, num_new=40, name="full"))
        assert isinstance(streaming.next_event(60), TokenChunk)
        reading = engine.submit(request(900, 2, name="full"))
        for handle in (streaming, reading):
            assert isinstance(answer(engine, handle, None)[1], Finished)
    beside = [place for place, (decoding, has_chunk) in enumerate(steps) if has_chunk and decoding]
    alone = [has_chunk for decoding, has_chunk in steps if not decoding]
    assert len(beside) > 3
    assert {later - earlier for earlier, later in pairwise(beside)} == {4}
    assert sum(alone) > 1  # once nothing else decodes, a chunk a step
    assert all(alone)
    assert len(chunks) == -(-(900 - BUCKETS[-1]) // SIZE)


def test_a_request_can_be_cancelled_between_chunks(
    loaded: LoadedModel, chunks: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    handles: list[Any] = []
    read = PromptLane.read

    def cancelling(self: PromptLane, piece: Any) -> None:
        read(self, piece)
        if piece.base == 2 * SIZE:
            handles[0].cancel()

    monkeypatch.setattr(PromptLane, "read", cancelling)
    with engine_of(loaded) as engine:
        free = engine.runner.pool.num_free
        handles.append(engine.submit(request(1000, 2, name="full")))
        assert isinstance(answer(engine, handles[0], None)[1], Cancelled)
        assert len(chunks) <= 4
        assert isinstance(answer(engine, engine.submit(request(9, 3, name="full")), None)[1], Finished)
        assert engine.runner.pool.num_free == free


def test_a_context_of_32k_takes_sixteen_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the chunks compute is left out."""
    bases: list[int] = []

    def read(self: PagedRunner, size: int, tokens: Sequence[int], cache: Any, base: int) -> None:
        if cache is not None:
            assert len(tokens) <= size == 2048
            bases.append(base)

    monkeypatch.setattr(PagedRunner, "read", read)
    monkeypatch.setattr("shared.model.model_checks.CHECK_TOKENS", 1)
    with engine_of(with_context(32768), kv_budget_bytes=1 << 28) as engine:
        handle = engine.submit(request(32700, 1, num_new=1, name="full"))
        assert isinstance(answer(engine, handle, None)[1], Finished)
    assert bases == [*range(0, 32700, 2048)]


@pytest.mark.parametrize(
    ("token_s", "size"), [(CHUNK_S / 3000, 2048), (CHUNK_S / 1500, 1024), (CHUNK_S / 600, 512), (CHUNK_S / 100, 0)]
)
def test_a_chunk_is_as_large_as_its_time_allows(token_s: float, size: int) -> None:
    asked: list[int] = []
    runner = SimpleNamespace(
        lane_sizes=(512, 1024, 2048),
        read=lambda size, *_: asked.append(size),
        waited_read=lambda size: asked.append(size),
        drop_lane=lambda: None,
    )
    lane, rate = PromptLane(runner), PrefillRate()  # type: ignore[arg-type]

    def seconds(work: Callable[[], None]) -> float:
        work()
        return token_s * asked[-1]

    for _ in lane.prepare(seconds, rate):
        pass
    assert lane.size == size
    assert (rate.least_s(1) > 0) == bool(size)
