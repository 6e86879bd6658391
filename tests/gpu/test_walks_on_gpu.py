"""On a GPU: walks from exit to exit in CUDA graphs, decided by the host or by conditional nodes, say what the exits say."""

import math

import pytest
import torch

from shared.ladder.walk import Walker
from shared.model.load import wrap_model
from shared.model.paged_kv import PagedCache
from shared.model.paged_runner import PagedRunner
from shared.model.recorder import CudaRecorder
from shared.ops import library
from tests.families import VOCABULARY_SIZE, build_family
from tests.random_ladder import random_ladder

HELD = 5
DEPTHS = (0, 2, 3)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(params=[False, True], ids=["host", "device"])
def runner(request: pytest.FixtureRequest) -> PagedRunner:
    if not library.runs_on("cuda"):
        pytest.skip("the kernels are not built for CUDA")
    torch.manual_seed(0)
    loaded = wrap_model(build_family("llama").to("cuda", torch.bfloat16))
    recorder = CudaRecorder(loaded.device, composes=request.param)
    made = PagedRunner(loaded, kv_budget_bytes=1 << 24, recorder=recorder)
    assert made.records
    assert made.recorder.composes == request.param
    return made


@pytest.mark.parametrize("count", [1, 5, 40])
def test_walks_say_what_each_exit_says_alone(runner: PagedRunner, count: int) -> None:
    ladder = random_ladder(runner.loaded, 3, DEPTHS).bind(runner)
    assert ladder.walk is not None
    levels = (0.0, math.inf, 0.0)
    depth = runner.num_layers
    walkers = []
    for number in range(count):
        cache = runner.new_cache(HELD + 1)
        assert isinstance(cache, PagedCache)
        ids = torch.randint(2, VOCABULARY_SIZE, (1, HELD))
        states = runner.run(ids, cache, first=0, last=depth, base=0)
        thresholds = (levels[number % 3], levels[(number + 1) % 3], 0.0)
        token = 2 + number
        walkers.append(Walker(token, cache, HELD, states[0, -1], 1, thresholds))
    for _ in range(2):  # what a walk leaves behind must not show in the next
        for walker, walked in zip(walkers, ladder.walk(walkers), strict=True):
            ids = torch.tensor([[walker.token]])
            for index, draft in enumerate(walked.drafts):
                state = runner.embed(ids, HELD)
                if draft.depth:
                    state = runner.run(ids, walker.cache, first=0, last=draft.depth, base=HELD)
                [own] = ladder.ask(index, state[0], walker.deep_state[None], [1])
                assert own.depth == draft.depth
                if count <= 16:
                    assert own.token == draft.token
                assert own.probability == pytest.approx(draft.probability, abs=0.02)
            assert len(walked.drafts) == 1 + next(
                index for index, level in enumerate(walker.thresholds) if level == 0.0
            )
            torch.testing.assert_close(walked.state, state[0, 0], rtol=0.1, atol=0.1)
