"""Every family: the engine's plain decoding is Hugging Face's, and exact is plain decoding."""

import pytest
import torch

from shared.ladder.policy import DepthPolicy
from shared.model.loaded import wrap_model
from tests.families import FAMILIES, VOCABULARY_SIZE, build_family
from tests.fixed_costs import fixed_cost_engine
from tests.scripted_ladder import ScriptedLadder

NUM_NEW = 16
PROMPT_LENGTHS = (9, 6, 3)


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(2, VOCABULARY_SIZE, (length,), generator=generator).tolist()
        for length in PROMPT_LENGTHS
    ]


def hf_generate(family: str, rows: list[list[int]]) -> list[list[int]]:
    model = build_family(family)
    width = max(map(len, rows))
    padded = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    out = model.generate(
        padded,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=NUM_NEW,
        pad_token_id=0,
        eos_token_id=None,
    )
    return [row[width:].tolist() for row in out]


@pytest.mark.parametrize("accelerate", [False, True], ids=["plain", "accelerated"])
def test_full_depth_is_hugging_faces_generate_and_exact_is_full_depth(family, accelerate):
    rows = prompts()
    alone = [hf_generate(family, [row])[0] for row in rows]
    together = hf_generate(family, rows)
    loaded = wrap_model(build_family(family), accelerate=accelerate)

    # Two right drafts, then a wrong one; the exits at layers are wrong at other places.
    answers = {tuple(row): answer for row, answer in zip(rows, alone, strict=True)}

    def oracle(context: list[int]) -> int:
        for row, answer in answers.items():
            if tuple(context[: len(row)]) == row:
                return [*answer, 0][min(len(context) - len(row), NUM_NEW)]
        raise AssertionError

    def table(context: list[int]) -> tuple[int, float] | None:
        step = len(context) % 5
        if step == 0:
            return None
        return (oracle(context) if step < 4 else 3, 0.9)

    def exits(context: list[int]) -> tuple[int, float]:
        return (oracle(context) if len(context) % 3 else 4, 0.95)

    ladder = ScriptedLadder(table, exits, depths=(0, 2, 4))
    with fixed_cost_engine(loaded, ladder) as engine:  # type: ignore[arg-type]
        for row, one, padded in zip(rows, alone, together, strict=True):
            full = engine.generate(row, policy="full", max_tokens=NUM_NEW)
            assert list(full.token_ids) == one == padded
            exact = engine.generate(
                row, policy=DepthPolicy("exact", max_drafts=5), max_tokens=NUM_NEW
            )
            assert exact.token_ids == full.token_ids
            assert 0 < exact.stats.num_accepted < exact.stats.num_drafted
            assert exact.stats.num_deep_passes < full.stats.num_deep_passes
