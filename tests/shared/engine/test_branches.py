"""Branches: other drafts beside a trunk. Accepted ones give more tokens, and no answer changes.
Over contiguous and over paged caches."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from shared.engine.drafting.confidence import Confidence
from shared.engine.engine import Engine
from shared.engine.request.request import Generation
from shared.errors import NeapError
from shared.ladder.policy import DepthPolicy
from shared.ladder.rungs import Draft
from shared.ladder.table_confidence import fit_table_confidence
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel, wrap_model
from shared.model.paged_runner import PagedRunner
from shared.model.sampling import SamplingParams
from tests.families import VOCABULARY_SIZE, build_family
from tests.fixed_costs import fixed_cost_engine
from tests.paged import load_family, make_runner
from tests.random_ladder import random_ladder
from tests.scripted_ladder import ScriptedLadder

PROMPTS = [(5, 17, 3, 44, 8), tuple(range(2, 34)), (9, 9)]
NUM_NEW = 24
EXIT = "depth-0"
# Those of which engines run over paged caches, by id().
PAGED: set[int] = set()
WAYS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.1, top_k=40, top_p=0.95, seed=7),
    "penalised": SamplingParams(repetition_penalty=1.3),
    "counted": SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, bad_words=((3, 44), (9, 9))),
}


# Gemma 3's windows hide most of a prompt; its layers are not one op. An accelerated Llama's are.
USUAL = ["llama", "gemma3-sliding paged"]
OTHERS = ["gemma3-sliding", "llama paged"]


@pytest.fixture(scope="module", params=[*USUAL, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    torch.manual_seed(0)
    family, *paged = request.param.split()
    if paged:
        found = load_family(family)
        PAGED.add(id(found))
        return found
    return wrap_model(build_family(family), accelerate=True)


def engine_of(loaded: LoadedModel, ladder: object = None) -> Engine:
    if id(loaded) not in PAGED:
        return fixed_cost_engine(loaded, ladder)
    return fixed_cost_engine(loaded, ladder, kv_budget_bytes=1 << 20, runner_of=make_runner)


def generate(
    loaded: LoadedModel, ladder: object, prompt: tuple[int, ...], way: str, policy: DepthPolicy | str = "exact"
) -> Generation:
    with engine_of(loaded, ladder) as engine:
        return answered(engine, prompt, way, policy)


def answered(engine: Engine, prompt: tuple[int, ...], way: str, policy: DepthPolicy | str) -> Generation:
    options = {"policy": policy, "max_tokens": NUM_NEW, "ignore_eos": True}
    return engine.generate(prompt, sampling=WAYS[way], logprobs=2, **options)


@pytest.fixture(scope="module")
def full_answer(loaded: LoadedModel) -> Callable[..., Generation]:
    """The full model's answer to (prompt, way)."""
    asked = [(prompt, way) for prompt in PROMPTS for way in WAYS]
    with engine_of(loaded) as engine:
        answers = {one: answered(engine, *one, "full") for one in asked}
    return lambda prompt, way="greedy": answers[prompt, way]


def scripted(prompt: tuple[int, ...], answer: tuple[int, ...]) -> ScriptedLadder:
    """The table is wrong at two places of four, and sure of it. At one of them the exit is right, and less sure. There
    the table is right again behind the exit's draft. Elsewhere the exit says too early what comes two tokens later."""
    text = [*prompt, *answer]

    def right(context: list[int]) -> int:
        return text[len(context)] if len(context) < len(text) else 0

    def wrong(context: list[int], by: int) -> int:
        return (right(context) + by) % VOCABULARY_SIZE

    def table(context: list[int]) -> tuple[int, float]:
        is_right = len(context) % 4 in (0, 2)
        return (right(context), 0.9) if is_right else (wrong(context, 1), 0.6)

    def exits(context: list[int]) -> tuple[int, float]:
        ahead = len(context) + 2
        early = text[ahead] if ahead < len(text) and text[ahead] != right(context) else wrong(context, 2)
        return (right(context) if len(context) % 4 == 1 else early), 0.3

    return ScriptedLadder(table, exits, depths=(0,))


@pytest.mark.parametrize("way", WAYS)
def test_an_accepted_branch_gives_more_tokens_and_changes_nothing(loaded, full_answer, way, added):
    for prompt in PROMPTS:
        full = full_answer(prompt, way)
        exact = generate(loaded, scripted(prompt, full.token_ids), prompt, way)
        assert exact.token_ids == full.token_ids
        for own, other in zip(exact.tokens, full.tokens, strict=True):
            assert own.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in own.alternatives] == [t for t, _ in other.alternatives]
        rungs = [token.rung for token in exact.tokens]
        # The exit's drafts are never the best ones, so these began branches. The table's draft follows, unless the
        # cache has no room for it, and then the model's own choice.
        begun = [place for place, rung in enumerate(rungs) if rung == EXIT]
        assert len(begun) >= NUM_NEW // 8
        followers = [rungs[place + 1 : place + 3] for place in begun]
        assert followers.count(["suffix", "full"]) >= 2
        assert all(after[0] == "full" or after in (["suffix", "full"], ["suffix"]) for after in followers if after)
        stats = exact.stats
        assert stats.num_accepted == sum(rung != "full" for rung in rungs)
        assert stats.num_tokens == 1 + stats.num_verify_passes + stats.num_accepted
    assert added


def test_every_accepted_branch_saves_passes(loaded, full_answer, added):
    [prompt, *_] = PROMPTS
    answer = full_answer(prompt).token_ids
    with_branches = generate(loaded, scripted(prompt, answer), prompt, "greedy").stats
    assert added
    accepted = with_branches.exits[EXIT][1]
    # The same drafts without branches.
    fixed = DepthPolicy("exact", max_drafts=8)
    plain = generate(loaded, scripted(prompt, answer), prompt, "greedy", fixed).stats
    assert plain.num_verify_passes - with_branches.num_verify_passes >= accepted - 1


def test_exact_answers_are_those_of_full_in_company(loaded, added):
    """Whatever random exits say, greedy and sampled, with prefixes of one another."""
    ladder = replace(random_ladder(loaded, 3, (0,), agreement=0.9), lookup_confidence=fit_table_confidence([], []))
    stem = tuple(range(3, 12)) * 4  # so that the tables say something, too
    requests = [(stem[: 6 + 5 * number], way) for number, way in enumerate([*WAYS, *WAYS][:5])]
    with engine_of(loaded, ladder) as engine:

        def answer(one: tuple[tuple[int, ...], str], policy: str) -> tuple[int, ...]:
            prompt, way = one
            found = engine.generate(prompt, sampling=WAYS[way], policy=policy, max_tokens=NUM_NEW, ignore_eos=True)
            return found.token_ids

        alone = [answer(one, "full") for one in requests]
        assert not added
        with ThreadPoolExecutor(len(requests)) as pool:
            together = list(pool.map(lambda one: answer(one, "exact"), requests))
        assert together == alone
        assert added
        assert [answer(one, "exact") for one in requests] == alone, "also from kept prefixes"


@pytest.mark.parametrize("policy", ["full", DepthPolicy("exact", max_drafts=4), DepthPolicy("relaxed", margin=0.0)])
def test_only_exact_has_branches(loaded, full_answer, policy, added):
    [prompt, *_] = PROMPTS
    answer = full_answer(prompt).token_ids
    assert generate(loaded, scripted(prompt, answer), prompt, "greedy", policy).token_ids == answer
    assert not added


def test_branches_have_room_in_a_cache_that_the_answer_fills(loaded, added):
    """The last tokens of a cache: branches that do not fit are left out."""
    prompt = tuple(range(2, 10))
    assert (len(prompt) + NUM_NEW) % 16 == 0
    answer = generate(loaded, None, prompt, "greedy", "full").token_ids
    assert generate(loaded, scripted(prompt, answer), prompt, "greedy").token_ids == answer
    assert added


def test_a_move_that_fails_ends_its_requests_and_no_others(loaded, full_answer, monkeypatch):
    [prompt, other, _] = PROMPTS
    answer = full_answer(prompt).token_ids
    expected = full_answer(other).token_ids

    def failing(self: object, moves: object) -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(PagedRunner, "move", failing)
        patch.setattr(ContiguousRunner, "move", failing)
        with engine_of(loaded, scripted(prompt, answer)) as engine:
            with pytest.raises(NeapError):
                engine.generate(prompt, max_tokens=NUM_NEW, ignore_eos=True)
            found = engine.generate(other, policy="full", max_tokens=NUM_NEW, ignore_eos=True)
            assert found.token_ids == expected


def test_states_that_are_shown_are_those_of_the_answer(loaded, full_answer, added):
    """Also where the last token of a pass is one of a branch, and after branches that were rejected."""
    [prompt, *_] = PROMPTS
    answer = full_answer(prompt).token_ids

    def states(ladder: object, policy: str) -> torch.Tensor:
        shown: list[torch.Tensor] = []
        with engine_of(loaded, ladder) as engine:
            handle = engine.submit(
                prompt, policy=policy, max_tokens=NUM_NEW, ignore_eos=True, on_states=lambda _, own: shown.append(own)
            )
            tokens = [t.token_id for event in handle.events() for t in getattr(event, "tokens", ())]
        assert tuple(tokens) == answer
        return torch.cat(shown)

    full = states(None, "full")
    assert not added
    exact = states(scripted(prompt, answer), "exact")
    assert added
    # Those of the same depth: an exit keeps others, too.
    torch.testing.assert_close(exact[: len(full), -1], full[:, -1], rtol=1e-4, atol=1e-4)


def test_every_verified_position_is_learned_from_once(loaded, full_answer, added, monkeypatch):
    [prompt, *_] = PROMPTS
    answer = full_answer(prompt).token_ids
    learned: list[int] = []
    record = Confidence.record

    def noted(self: Confidence, said: list[list[Draft]], tokens: list[int]) -> None:
        learned.extend(token for _, token in zip(said, tokens, strict=False))
        record(self, said, tokens)

    monkeypatch.setattr(Confidence, "record", noted)
    generate(loaded, scripted(prompt, answer), prompt, "greedy")
    assert added
    # They are tokens of the answer, in its order. What was recorded twice, or for another place, would not be.
    answered = iter(answer)
    assert all(token in answered for token in learned)
    assert len(learned) >= NUM_NEW // 2
