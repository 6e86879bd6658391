"""Penalties, biases and forbidden tokens: answers are those of a plain loop over the model, drafted, in company, and
resumed after any token."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from shared.engine.engine import Engine
from shared.errors import InvalidInput
from shared.ladder.policy import DepthPolicy
from shared.model import context_counts
from shared.model.loaded import LoadedModel, wrap_model
from shared.model.sampling import SamplingParams, Trial
from tests.changed_scores import changed
from tests.families import VOCABULARY_SIZE, build_family
from tests.fixed_costs import fixed_cost_engine
from tests.scripted_ladder import ScriptedLadder
from tests.tiers import tiered

PROMPT = (5, 17, 3, 44, 8, 44, 3)
NUM_NEW = 16


def plain_loop(loaded: LoadedModel, sampling: SamplingParams, stops: set[int]) -> list[int]:
    """Greedy tokens, one pass over the whole sequence for each. A stop token is not returned."""
    tokens = list(PROMPT)
    ends = frozenset(stops | loaded.eos_token_ids)
    while len(tokens) < len(PROMPT) + NUM_NEW:
        with torch.no_grad():
            logits = loaded.model(torch.tensor([tokens])).logits[0, -1]
        trial = Trial(sampling, tokens, num_prompt_tokens=len(PROMPT), end_token_ids=ends)
        token = int(changed(logits, trial).argmax())
        if token in stops:
            break
        tokens.append(token)
        if token in ends:
            break
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("policy", ["full", "exact"])
def test_a_text_is_counted_once_and_not_at_every_step(bare, policy, monkeypatch):
    counted, count = [], context_counts._counted
    monkeypatch.setattr(context_counts, "_counted", lambda *text: counted.append(text) or count(*text))
    sampling = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1)
    with fixed_cost_engine(bare, ScriptedLadder(lambda context: (2, 0.9))) as engine:
        found = engine.generate(PROMPT, policy=policy, sampling=sampling, max_tokens=NUM_NEW, ignore_eos=True)
    assert (len(found.tokens), len(counted)) == (NUM_NEW, 2), "the whole and the answer"


@pytest.fixture(scope="module")
def bare() -> LoadedModel:
    torch.manual_seed(0)
    return wrap_model(build_family("llama"), accelerate=True)


@pytest.fixture(scope="module")
def answer(bare: LoadedModel) -> list[int]:
    """Without anything that changes scores."""
    return plain_loop(bare, SamplingParams(), set())


@pytest.fixture(scope="module")
def loaded(bare: LoadedModel, answer: list[int]) -> LoadedModel:
    """Its plain answer ends with the fifth token."""
    assert answer[4] not in answer[:4]
    return replace(bare, eos_token_ids=frozenset([answer[4]]))


def kinds(answer: list[int]) -> dict[str, SamplingParams]:
    """The tokens of the plain answer, and of the prompt, are what they meet."""
    biased = {answer[0]: -100.0, answer[4]: -100.0, PROMPT[2]: 100.0, 50: 99.9}
    words = ((PROMPT[-2], PROMPT[-1], answer[0]), (answer[1],), (answer[4],))
    return {
        "presence": SamplingParams(presence_penalty=2.0, logit_bias=biased),
        "negative presence": SamplingParams(presence_penalty=-2.0, min_tokens=NUM_NEW),
        "frequency": SamplingParams(frequency_penalty=0.02, logit_bias=biased),
        "negative frequency": SamplingParams(frequency_penalty=-0.5, min_tokens=NUM_NEW),
        "bias": SamplingParams(logit_bias={answer[2]: -100.0, answer[4]: -0.5}),
        "min_tokens": SamplingParams(min_tokens=NUM_NEW),
        "min_tokens up to the end": SamplingParams(min_tokens=4),
        "min_tokens beyond the end": SamplingParams(min_tokens=5),
        "bad words": SamplingParams(bad_words=words, min_tokens=3),
        "all": SamplingParams(
            repetition_penalty=1.1,
            presence_penalty=0.3,
            frequency_penalty=0.2,
            logit_bias={answer[2]: -100.0},
            min_tokens=9,
            bad_words=words,
        ),
    }


KINDS = tuple(kinds(list(range(5))))


def generated(engine: Engine, kind: SamplingParams, policy: str, resumed: list[int]) -> list[int]:
    found = engine.generate(PROMPT, sampling=kind, policy=policy, max_tokens=NUM_NEW, resumed_ids=resumed)
    return [*resumed, *found.token_ids]


def half_right(answer: list[int]) -> ScriptedLadder:
    """Every third draft is wrong, and no draft is any that a request forbids."""
    text = [*PROMPT, *answer]

    def draft(context: list[int]) -> tuple[int, float]:
        right = text[len(context)] if len(context) < len(text) else 0
        return (right + (len(context) % 3 == 0)) % VOCABULARY_SIZE, 0.8

    return ScriptedLadder(draft)


@pytest.mark.parametrize("name", tiered(KINDS, {"all"}))
def test_answers_are_those_of_a_plain_loop(loaded, answer, name):
    """In one run, drafted, and resumed after any token, beside another request that counts tokens, too."""
    sampling = kinds(answer)[name]
    expected = plain_loop(loaded, sampling, set())
    assert (expected == answer[:5]) == (name == "min_tokens up to the end")
    with fixed_cost_engine(loaded, half_right(expected)) as engine:
        for policy in ("full", "exact"):
            assert generated(engine, sampling, policy, []) == expected
            for cut in range(1, len(expected)):
                beside = engine.submit([9, 9, cut], sampling=kinds(answer)["all"], policy="full", max_tokens=NUM_NEW)
                assert generated(engine, sampling, policy, expected[:cut]) == expected, cut
                beside.cancel()


@pytest.mark.parametrize("name", tiered(KINDS, {"bad words"}))
def test_a_bad_word_may_begin_anywhere(loaded, answer, name):
    """Each pair of neighbours is forbidden in turn: in one run and resumed between its two tokens."""
    text = [PROMPT[-1], *plain_loop(loaded, kinds(answer)[name], set())]
    for place, pair in enumerate(pairwise(text[:8])):
        base = kinds(answer)[name]
        sampling = replace(base, bad_words=(*base.bad_words, pair))
        expected = plain_loop(loaded, sampling, set())
        assert pair not in pairwise([PROMPT[-1], *expected])
        with fixed_cost_engine(loaded, half_right(expected)) as engine:
            assert generated(engine, sampling, "exact", expected[:place]) == expected


def test_stop_tokens_and_stop_strings_wait_for_min_tokens(loaded, answer):
    stops = {answer[1], answer[6]}
    for least in range(NUM_NEW):
        sampling = SamplingParams(min_tokens=least)
        expected = plain_loop(loaded, sampling, stops)
        assert len(expected) >= least
        with fixed_cost_engine(loaded, half_right(expected)) as engine:
            found = engine.generate(PROMPT, sampling=sampling, max_tokens=NUM_NEW, stop_token_ids=stops)
            assert list(found.token_ids) == expected


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("logit_bias", {"logit_bias": {VOCABULARY_SIZE: 1.0}}),
        ("logit_bias", {"logit_bias": {-1: 1.0}}),
        ("bad_words", {"bad_words": ((3, VOCABULARY_SIZE),)}),
        ("bad_words", {"bad_words": tuple((token,) for token in range(VOCABULARY_SIZE))}),
        ("bad_words", {"bad_words": tuple((t,) for t in range(1, 97)), "min_tokens": 1}),
        ("min_tokens", {"min_tokens": NUM_NEW + 1}),
    ],
)
def test_what_the_model_cannot_honour_is_refused_by_name(loaded, name, changes):
    with fixed_cost_engine(loaded) as engine, pytest.raises(InvalidInput, match=name):
        generated(engine, SamplingParams(**changes), "full", [])


@pytest.mark.parametrize("policy", ["exact", DepthPolicy("relaxed", threshold=0.5)])
def test_drafts_that_a_request_forbids_neither_cost_a_pass_nor_become_final(loaded, policy):
    """Bad words of one and two tokens, and the end before it is allowed."""
    [end] = loaded.eos_token_ids

    def draft(context: list[int]) -> tuple[int, float]:
        return (7, 9, end)[len(context) % 3], 0.9

    for bad_words in (((7,), (9,)), ((7, 9),)):
        sampling = SamplingParams(bad_words=bad_words, min_tokens=NUM_NEW, logit_bias={7: 50.0})
        with fixed_cost_engine(loaded, ScriptedLadder(draft)) as engine:
            full = generated(engine, sampling, "full", [])
            found = engine.generate(PROMPT, sampling=sampling, policy=policy, max_tokens=NUM_NEW)
        assert list(found.token_ids) == full
        assert len(full) == NUM_NEW
        assert end not in full
        assert (7, 9) not in pairwise(full)
        assert found.stats.num_drafted == found.stats.num_accepted
        assert (found.stats.num_drafted > 0) == (7 in full)
