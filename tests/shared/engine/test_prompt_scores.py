"""Log-probabilities of a prompt are those of the whole model, however the prompt is read."""

import random

import pytest
import torch

from shared.engine import prompt_scores
from shared.engine.engine import Engine
from shared.engine.prompt_scores import score_weight
from shared.engine.request.admission import MAX_PREFILL_TOKENS
from shared.engine.request.prompt import Prompt
from shared.engine.request.request import FinishReason, GenerationRequest, StoppingParams
from shared.errors import InvalidInput
from shared.ladder.policy import DepthPolicy
from shared.model.loaded import LoadedModel, wrap_model
from tests.fixed_costs import fixed_cost_engine
from tests.worker import build_ladder, build_model

VOCABULARY_SIZE = 263
draw = random.Random(0)
# Longer than what a step reads.
LONG = [draw.randrange(VOCABULARY_SIZE) for _ in range(300)]
PROMPTS = {"one": [5], "two": [5, 17], "long": LONG}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build_model(), accelerate=True)


def scores(engine: Engine, prompt: Prompt, policy: str = "full", **options: object) -> list[tuple]:
    found = engine.generate(prompt, policy=policy, max_tokens=3, ignore_eos=True, prompt_logprobs=2, **options)
    assert len(found.tokens) == 3
    return [(token.token_id, token.logprob, token.alternatives) for token in found.prompt]


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("max_logits", [1, 7 * VOCABULARY_SIZE, 2**22])
def test_they_are_those_of_the_model(loaded, name, max_logits, monkeypatch):
    monkeypatch.setattr(prompt_scores, "MAX_LOGITS", max_logits)
    prompt = PROMPTS[name]
    with fixed_cost_engine(loaded) as engine:
        found = scores(engine, prompt)
    assert [token for token, _, _ in found] == prompt
    assert found[0][1:] == (None, ())
    with torch.inference_mode():
        expected = loaded.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for place, (token, value, alternatives) in enumerate(found[1:]):
        assert value == pytest.approx(expected[place, token].item(), abs=1e-4)
        best = expected[place].topk(2)
        assert [own for own, _ in alternatives] == best.indices.tolist()
        assert [own for _, own in alternatives] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_no_more_logits_are_in_memory_than_allowed(loaded, monkeypatch):
    monkeypatch.setattr(prompt_scores, "MAX_LOGITS", 5 * VOCABULARY_SIZE)
    with fixed_cost_engine(loaded) as engine:
        seen, logits = [], type(engine._decoder.runner).logits

        def noted(self, states):
            seen.append(states.shape[0])
            return logits(self, states)

        monkeypatch.setattr(type(engine._decoder.runner), "logits", noted)
        scores(engine, LONG)
    assert sum(seen) >= len(LONG) - 1
    assert max(seen) <= 5


def test_a_piece_that_is_scored_is_shorter(loaded):
    """What the head takes for it counts among what streams beside it wait for."""
    sizes: dict[bool, list[int]] = {}
    for scored in (False, True):
        with fixed_cost_engine(loaded, prefix_cache_bytes=0) as engine:
            taken = sizes[scored] = []
            handle = engine.submit(
                LONG,
                policy="full",
                max_tokens=1,
                prompt_logprobs=0 if scored else None,
                on_states=lambda position, states, taken=taken: taken.append(len(states)),
            )
            assert list(handle.events())
    assert sum(sizes[True]) == sum(sizes[False]) == len(LONG)
    assert max(sizes[True]) == int(MAX_PREFILL_TOKENS / score_weight(loaded)) < max(sizes[False])


def test_a_prompt_of_one_token_asks_for_no_logits_of_nothing(loaded, monkeypatch):
    """Not every head takes no states."""
    with fixed_cost_engine(loaded) as engine:
        kind = type(engine._decoder.runner)
        logits = kind.logits

        def of_some(self, states):
            assert len(states)
            return logits(self, states)

        monkeypatch.setattr(kind, "logits", of_some)
        assert [value for _, value, _ in scores(engine, [5])] == [None]


@pytest.mark.parametrize("policy", ["full", "exact"])
def test_they_are_the_same_under_every_policy_cached_and_in_company(loaded, policy):
    other = [3, *LONG[1:]]
    with fixed_cost_engine(loaded, build_ladder(loaded)) as engine:
        alone = [scores(engine, prompt) for prompt in (LONG, other)]
        assert engine.generate(LONG, policy="full", max_tokens=2).finished.num_cached_tokens > 100
        handles = [
            engine.submit(prompt, policy=policy, max_tokens=40, prompt_logprobs=2) for prompt in (LONG, other, LONG)
        ]
        for handle, expected in zip(handles, (*alone, alone[0]), strict=True):
            *chunks, finished = handle.events()
            found = [token for chunk in chunks for token in chunk.prompt]
            assert [(t.token_id, t.logprob, t.alternatives) for t in found] == expected
            assert finished.num_cached_tokens == 0
            # They come before the answer.
            first = next(i for i, chunk in enumerate(chunks) if chunk.tokens)
            assert not any(chunk.prompt for chunk in chunks[first:])
            assert first > 1, "in several pieces"


@pytest.mark.parametrize("num_scored", [1, 2, 100, 257, 299, 300])
def test_what_a_caller_has_is_not_sent_again(loaded, num_scored):
    with fixed_cost_engine(loaded) as engine:
        whole = scores(engine, LONG)
        request = GenerationRequest(
            tuple(LONG),
            stopping=StoppingParams(max_tokens=2),
            policy=DepthPolicy("full"),
            prompt_logprobs=2,
            num_scored=num_scored,
        )
        *chunks, _ = engine.submit(request).events()
        found = [token for chunk in chunks for token in chunk.prompt]
        assert [(t.token_id, t.logprob, t.alternatives) for t in found] == whole[num_scored:]
        answer = [token.token_id for chunk in chunks for token in chunk.tokens]
        resumed = engine.generate(LONG, policy="full", max_tokens=2, prompt_logprobs=2, resumed_ids=answer[:1])
        assert (resumed.prompt, list(resumed.token_ids)) == ((), answer[1:])


@pytest.mark.parametrize("policy", ["full", "exact"])
@pytest.mark.parametrize("name", PROMPTS)
def test_nothing_need_be_generated(loaded, name, policy):
    with fixed_cost_engine(loaded, build_ladder(loaded)) as engine:
        whole = scores(engine, PROMPTS[name])
        found = engine.generate(PROMPTS[name], policy=policy, max_tokens=0, prompt_logprobs=2)
        assert [(t.token_id, t.logprob, t.alternatives) for t in found.prompt] == whole
        assert (found.tokens, found.text, found.finished.reason) == ((), "", FinishReason.LENGTH)
        assert found.finished.num_completion_tokens == 0
        unscored = engine.generate(PROMPTS[name], policy=policy, max_tokens=0)
        assert (unscored.prompt, unscored.tokens) == ((), ())
        # What was read is there for the next request.
        again = engine.generate(PROMPTS[name], policy=policy, max_tokens=3, ignore_eos=True)
        assert len(again.tokens) == 3
        with pytest.raises(InvalidInput, match="already"):
            engine.generate(PROMPTS[name], policy=policy, max_tokens=0, resumed_ids=[5])
        with pytest.raises(InvalidInput, match="max_tokens"):
            engine.generate(PROMPTS[name], policy=policy, max_tokens=-1)


def test_too_many_are_refused(loaded):
    with fixed_cost_engine(loaded) as engine, pytest.raises(InvalidInput, match="prompt_logprobs"):
        engine.generate(LONG, prompt_logprobs=21)
