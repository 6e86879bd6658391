"""Every family: the engine's plain decoding is Hugging Face's, and exact is plain decoding."""

from functools import cache
from typing import Any

import pytest
import torch

from shared.engine.memory import prefixes
from shared.engine.request import admission
from shared.engine.request.request import Finished, GenerationRequest, StoppingParams
from shared.ladder.policy import DepthPolicy
from shared.model.loaded import LoadedModel, wrap_model
from shared.model.sampling import SamplingParams
from tests import paged
from tests.families import BORDER, BORDERED, DEPENDS_ON_COMPANY, FAMILIES, VOCABULARY_SIZE, build_family
from tests.fixed_costs import fixed_cost_engine
from tests.scripted_ladder import ScriptedLadder
from tests.tiers import tiered

NUM_NEW = 16
PROMPT_LENGTHS = (9, 6, 3)


# The passes of the other usual families are compared in tests/shared/model/test_runner.py.
@pytest.fixture(params=tiered(sorted(FAMILIES), {"llama", "mixtral"}))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(7)
    return [
        tuple(torch.randint(2, VOCABULARY_SIZE, (length,), generator=generator).tolist()) for length in PROMPT_LENGTHS
    ]


@cache
def hf_generate(family: str, *rows: tuple[int, ...], num_new: int = NUM_NEW) -> list[list[int]]:
    model = build_family(family)
    width = max(map(len, rows))
    padded = torch.tensor([[*[0] * (width - len(row)), *row] for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    out = model.generate(
        padded, attention_mask=mask, do_sample=False, max_new_tokens=num_new, pad_token_id=0, eos_token_id=None
    )
    return [row[width:].tolist() for row in out]


def test_full_depth_is_hugging_faces_generate_and_exact_is_full_depth(family):
    """By the model's own modules, and accelerated."""
    rows = prompts()
    alone = [hf_generate(family, row)[0] for row in rows]
    together = hf_generate(family, *rows)

    # Two right drafts, then a wrong one; the exits at layers are wrong at other places.
    answers = dict(zip(rows, alone, strict=True))

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
    policy = DepthPolicy("exact", max_drafts=5)
    for accelerate in (False, True):
        loaded = wrap_model(build_family(family), accelerate=accelerate)
        with fixed_cost_engine(loaded, ladder) as engine:
            for row, one, padded in zip(rows, alone, together, strict=True):
                full = engine.generate(row, policy="full", max_tokens=NUM_NEW)
                assert list(full.token_ids) == one
                assert padded == one or family in DEPENDS_ON_COMPANY
                exact = engine.generate(row, policy=policy, max_tokens=NUM_NEW)
                assert exact.token_ids == full.token_ids
                assert 0 < exact.stats.num_accepted < exact.stats.num_drafted
                assert exact.stats.num_verify_passes < full.stats.num_verify_passes


# Prompts that end before, at and behind every border, each the beginning of the next, and an answer that crosses what
# its prompt does not.
LENGTHS_AT_A_BORDER = (BORDER - 5, BORDER - 1, BORDER, BORDER + 1, 3 * BORDER)
NUM_NEW_AT_A_BORDER = BORDER


def _loaded_for(kind: str, family: str) -> tuple[LoadedModel, dict[str, Any]]:
    """The model, and the arguments of an engine."""
    if kind == "paged":
        budget = {"kv_budget_bytes": 1 << 20}
        return paged.load_family(family), {"runner_of": paged.make_runner, **budget}
    return wrap_model(build_family(family), accelerate=kind == "accelerated"), {}


@pytest.mark.parametrize("family", tiered(BORDERED, {"gemma3-sliding"}))
@pytest.mark.parametrize("kind", tiered(["accelerated", "paged", "plain"], {"accelerated"}))
def test_beyond_its_border_a_family_gives_the_tokens_of_generate(kind, family, monkeypatch):
    """Alone and in company, in pieces, over kept prefixes, and with drafts across the border."""
    if kind == "plain" and family not in DEPENDS_ON_COMPANY:
        pytest.skip("an accelerated model is asked")
    if kind == "paged" and family in paged.NOT_PAGED:
        pytest.skip("it does not run over paged caches")
    monkeypatch.setattr(admission, "MAX_PREFILL_TOKENS", 5)
    monkeypatch.setattr(admission, "MIN_PREFILL_TOKENS", 5)
    monkeypatch.setattr(prefixes, "MIN_SHARED", 4)
    generator = torch.Generator().manual_seed(7)
    text = torch.randint(2, VOCABULARY_SIZE, (LENGTHS_AT_A_BORDER[-1],), generator=generator)
    rows = [tuple(text[:length].tolist()) for length in LENGTHS_AT_A_BORDER]
    expected = [hf_generate(family, row, num_new=NUM_NEW_AT_A_BORDER)[0] for row in rows]

    def right_but_for_some(context: list[int]) -> tuple[int, float] | None:
        """The drafts of whichever answer the context is the beginning of; every seventh is wrong."""
        if len(context) % 7 == 0:
            return 3, 0.9
        for row, answer in zip(rows, expected, strict=True):
            if [*row, *answer][: len(context)] == context and len(row) <= len(context):
                return (*answer, 0)[len(context) - len(row)], 0.9
        return None

    loaded, options = _loaded_for(kind, family)
    ladder = ScriptedLadder(right_but_for_some)
    exact = DepthPolicy("exact", max_drafts=4)
    with fixed_cost_engine(loaded, ladder, **options) as engine:  # type: ignore[arg-type]
        for row, tokens in zip(rows, expected, strict=True):
            for policy in ("full", exact):
                answer = engine.generate(row, policy=policy, max_tokens=NUM_NEW_AT_A_BORDER)
                assert list(answer.token_ids) == tokens
            assert answer.stats.num_accepted > 0
        asked = [
            GenerationRequest(
                row, SamplingParams(), StoppingParams(max_tokens=NUM_NEW_AT_A_BORDER), DepthPolicy("full")
            )
            for row in rows
        ]
        handles = [engine.submit(request) for request in asked]
        for handle, tokens in zip(handles, expected, strict=True):
            chunks = [event for event in handle.events() if not isinstance(event, Finished)]
            assert [token.token_id for chunk in chunks for token in chunk.tokens] == tokens
