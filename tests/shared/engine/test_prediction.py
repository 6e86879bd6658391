"""Predicted outputs: any prediction changes nothing but the number of passes."""

import random

import pytest
import torch

from shared.engine.engine import Engine
from shared.engine.request.request import Finished, TokenChunk
from shared.ladder.policy import DepthPolicy
from shared.ladder.proposers import PREDICTION
from shared.model.loaded import LoadedModel, wrap_model
from shared.model.sampling import SamplingParams
from tests.families import VOCABULARY_SIZE, build_family
from tests.fixed_costs import fixed_cost_engine
from tests.scripted_ladder import ScriptedLadder
from tests.tiers import tiered

PROMPT = (5, 17, 3, 44, 8)
NUM_NEW = 48
SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.2, seed=3),
    "counted": SamplingParams(frequency_penalty=0.5, bad_words=((3, 4),)),
}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    torch.manual_seed(0)
    return wrap_model(build_family("llama"), accelerate=True)


def silent() -> ScriptedLadder:
    return ScriptedLadder(lambda context: None)


def generated(engine: Engine, **options: object) -> tuple[tuple[int, ...], Finished]:
    tokens: list[int] = []
    for event in engine.submit(PROMPT, max_tokens=NUM_NEW, ignore_eos=True, **options).events():
        if isinstance(event, TokenChunk):
            tokens += [token.token_id for token in event.tokens]
    assert isinstance(event, Finished)
    return tuple(tokens), event


def predictions(answer: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    draw = random.Random(0)
    noise = [draw.randrange(VOCABULARY_SIZE) for _ in range(120)]
    edited = [t if draw.random() < 0.9 else draw.randrange(VOCABULARY_SIZE) for t in answer]
    return {
        "right": answer,
        "edited": tuple(edited),
        "with a hole": answer[:15] + answer[28:],
        "with more": answer[:15] + tuple(noise[:20]) + answer[15:],
        "turned round": answer[24:] + answer[:24],
        "noise": tuple(noise),
        "the prompt": PROMPT,
        "one token": answer[:1],
    }


NAMES = tuple(predictions(tuple(range(48))))


@pytest.mark.parametrize("way", tiered(SAMPLINGS, {"counted"}))
def test_exact_is_full_whatever_is_predicted(loaded, way):
    """Alone and beside others, in one run and resumed after any token, with the same counts."""
    sampling = SAMPLINGS[way]
    unsure = ScriptedLadder(lambda context: (sum(context) % VOCABULARY_SIZE, 0.5))
    with fixed_cost_engine(loaded, unsure) as engine:
        answer, plain = generated(engine, sampling=sampling, policy="full")
        assert plain.num_accepted_prediction_tokens == plain.num_rejected_prediction_tokens == 0
        for name, prediction in predictions(answer).items():
            options = {"sampling": sampling, "prediction": prediction}
            _, full = generated(engine, policy="full", **options)
            counts = full.num_accepted_prediction_tokens, full.num_rejected_prediction_tokens
            assert sum(counts) >= len(prediction)
            for cut in range(0, NUM_NEW, 5):
                beside = engine.submit([9, 9, cut], policy="exact", prediction=answer, max_tokens=20)
                rest, end = generated(engine, resumed_ids=answer[:cut], **options)
                beside.cancel()
                assert answer[:cut] + rest == answer, (name, cut)
                found = end.num_accepted_prediction_tokens, end.num_rejected_prediction_tokens
                assert found == counts, (name, cut)
                assert end.num_prompt_tokens == len(PROMPT)


def test_what_is_right_saves_passes(loaded):
    with fixed_cost_engine(loaded, silent()) as engine:
        answer, plain = generated(engine, policy="exact")
        assert plain.depth.num_verify_passes == NUM_NEW - 1
        passes, accepted = {}, {}
        for name, prediction in predictions(answer).items():
            tokens, end = generated(engine, prediction=prediction)
            assert tokens == answer
            passes[name] = end.depth.num_verify_passes
            accepted[name] = end.num_accepted_prediction_tokens
            _, drafted = end.depth.exits.get(PREDICTION, (0, 0))
            # The rest were chosen by the model itself, which gives one token of each pass.
            assert accepted[name] - passes[name] - 1 <= drafted <= accepted[name]
    assert accepted["right"] == NUM_NEW
    assert passes["right"] <= NUM_NEW // 8 + 1, "eight drafts and the model's own choice in each"
    num_edits = sum(a != b for a, b in zip(answer, predictions(answer)["edited"], strict=True))
    assert 2 <= num_edits <= 10
    assert accepted["edited"] >= NUM_NEW - 3 * num_edits
    assert passes["edited"] <= NUM_NEW // 8 + 3 * num_edits
    assert accepted["with a hole"] >= len(predictions(answer)["with a hole"]) - 4
    assert accepted["with more"] >= NUM_NEW - 6
    assert accepted["turned round"] >= NUM_NEW - 16
    assert passes["noise"] >= NUM_NEW * 3 // 4, "it is soon not believed"


def test_a_fixed_number_of_drafts_and_layers_that_must_run_are_respected(loaded):
    with fixed_cost_engine(loaded, silent()) as engine:
        answer, _ = generated(engine, policy="full")
        few = DepthPolicy("exact", max_drafts=2)
        tokens, end = generated(engine, policy=few, prediction=answer)
        assert tokens == answer
        assert end.depth.num_verify_passes == NUM_NEW // 3
        deep = DepthPolicy("exact", min_layers=2)
        tokens, end = generated(engine, policy=deep, prediction=answer)
        assert tokens == answer
        assert PREDICTION not in end.depth.exits
