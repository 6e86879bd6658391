"""A tiny Llama without a tokenizer, and the answer of its full depth to a prompt."""

import pytest

from shared.model.loaded import LoadedModel, wrap_model
from tests.families import build_family
from tests.fixed_costs import fixed_cost_engine
from tests.known_answer import NUM_NEW, PROMPT
from tests.unwritten_caches import unwritten_positions_are_nan

__all__ = ["unwritten_positions_are_nan"]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build_family("llama"), accelerate=True)


@pytest.fixture(scope="module")
def answer(loaded: LoadedModel) -> list[int]:
    with fixed_cost_engine(loaded) as engine:
        return list(engine.generate(PROMPT, policy="full", max_tokens=NUM_NEW).token_ids)
