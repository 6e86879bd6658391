"""Answers under a constraint: what is drafted never changes them, and all of them fulfil it."""

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from shared.constraints import compiler
from shared.constraints.constraint import Constraint
from shared.engine.memory.budget import kv_token_bytes
from shared.engine.request.request import (
    Finished,
    FinishReason,
    Generation,
    GenerationRequest,
    StoppingParams,
    TokenChunk,
)
from shared.errors import InvalidInput, NeapError
from shared.ladder.policy import DepthPolicy
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.sampling import SamplingParams
from tests.constrained import (
    CONSTRAINTS,
    OBJECT,
    RandomSchemas,
    answer_of,
    build_loaded,
    build_random_ladder,
    kubernetes_schemas,
)
from tests.fixed_costs import FixedCosts, fixed_cost_engine
from tests.scripted_ladder import ScriptedLadder
from tests.tiers import tiered
from tests.worker import EOS

PROMPTS = ("hello", "a b a b a b", '{"hello": "')
WAYS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0, seed=7),
    "filtered": SamplingParams(temperature=1.3, top_k=40, top_p=0.95, seed=3),
    "penalised": SamplingParams(repetition_penalty=1.3),
}
JSON = Constraint(json_schema=json.dumps(OBJECT))
# Not text that JSON may have within or outside of strings.
FORBIDDEN = 188


@pytest.fixture(scope="module")
def loaded():
    return build_loaded()


@pytest.fixture(scope="module")
def ladder(loaded):
    return build_random_ladder(loaded)


def accepted_of(answer: Generation, proposer: str) -> int:
    return answer.stats.exits.get(proposer, (0, 0))[1]


# Every constraint where masks are made for some rows and for all, and one by every rule.
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *tiered(((name, "greedy") for name in CONSTRAINTS), {("lark", "greedy")}),
        *tiered((("object", way) for way in WAYS if way != "greedy"), ()),
        *tiered(((name, "filtered") for name in CONSTRAINTS if name != "object"), ()),
    ],
)
def test_exact_is_full_alone_and_in_company(loaded, ladder, name, way):
    """With whatever random tables and exits say, and beside other constraints."""
    num_forced = num_others = 0
    with fixed_cost_engine(loaded, ladder) as engine:
        options = {"constraint": CONSTRAINTS[name], "sampling": WAYS[way], "logprobs": 2}
        for prompt in PROMPTS:
            full = answer_of(engine, prompt, policy="full", **options)
            others = [
                engine.submit(prompt, constraint=other, policy="exact", max_tokens=120)
                for other in [*CONSTRAINTS.values(), None]
            ]
            beside = answer_of(engine, prompt, policy="exact", **options)
            for other in others:
                other.cancel()
            for exact in (beside, answer_of(engine, prompt, policy="exact", **options)):
                assert exact.token_ids == full.token_ids
                assert exact.finished.reason == full.finished.reason
                for own, other in zip(exact.tokens, full.tokens, strict=True):
                    assert own.logprob == pytest.approx(other.logprob, abs=1e-4)
                num_forced += accepted_of(exact, "grammar")
                # Of a random ladder hardly any is right, and which one depends on the machine.
                num_others += exact.stats.num_drafted - accepted_of(exact, "grammar")
            assert fulfils(full, CONSTRAINTS[name])
    if name in ("object", "tree"):
        assert num_forced > 20
    if name == "any object":
        assert num_others > 0


def fulfils(answer: Generation, constraint: Constraint) -> bool:
    """Whether a complete answer does, by other means than the grammar; JSON only."""
    assert answer.finished.reason in (FinishReason.EOS, FinishReason.LENGTH)
    if answer.finished.reason is FinishReason.LENGTH:
        return len(answer.token_ids) == 120
    assert answer.token_ids[-1] == EOS
    if constraint.json_schema is not None:
        jsonschema.validate(json.loads(answer.text), json.loads(constraint.json_schema))
    if constraint.json_object:
        assert isinstance(json.loads(answer.text), dict)
    if constraint.choice is not None:
        assert answer.text in constraint.choice
    return True


def test_a_forced_token_takes_no_pass_of_its_own_where_only_sure_drafts_pay(loaded, ladder):
    with fixed_cost_engine(loaded, ladder, cost_meter=FixedCosts(growth=0.98)) as engine:
        full = answer_of(engine, "hello", constraint=JSON, policy="full")
        exact = answer_of(engine, "hello", constraint=JSON, logprobs=1)
    assert exact.token_ids == full.token_ids
    assert full.finished.reason is FinishReason.EOS
    # All drafts are forced, and all but those beyond the room of a pass are drafted.
    assert exact.stats.num_accepted == exact.stats.num_drafted == accepted_of(exact, "grammar")
    assert exact.stats.num_verify_passes < full.stats.num_verify_passes / 2
    assert exact.tokens[-1].proposer == "grammar", "the end is forced, too"
    forced = [token for token in exact.tokens if token.proposer == "grammar"]
    assert any(token.logprob < -1.0 for token in forced), "the model's own, before the constraint"
    assert any(token.alternatives[0][0] != token.token_id for token in forced)


def test_forbidden_drafts_are_cut_before_they_cost_anything(loaded):
    """A table and an exit that are sure of what the constraint never allows."""
    asked: list[int] = []

    def table(context: list[int]) -> tuple[int, float]:
        asked.append(len(context))
        return FORBIDDEN, 0.99

    with fixed_cost_engine(loaded, ScriptedLadder(table, lambda _: (EOS, 0.9), (0,))) as engine:
        exact = answer_of(engine, "hello", constraint=JSON)
        full = answer_of(engine, "hello", constraint=JSON, policy="full")
    assert asked
    assert exact.token_ids == full.token_ids
    # The exit's draft of the end is allowed at the end only, where it is forced.
    assert exact.stats.num_drafted == exact.stats.num_accepted == accepted_of(exact, "grammar") > 0
    assert exact.stats.num_token_layers == loaded.num_layers * (exact.stats.num_verify_passes + exact.stats.num_drafted)


def test_what_begins_forced_text_is_drafted_and_never_final_by_itself(loaded):
    """Two tokens may begin `"` here: the model chooses the other one, if not always."""
    constraint = Constraint(regex='(x"(:|[a-z]|,)){20}')
    silent = ScriptedLadder(lambda _: (FORBIDDEN, 0.01))
    with fixed_cost_engine(loaded, silent) as engine:
        options = {"constraint": constraint}
        full = answer_of(engine, "hello", policy="full", **options)
        exact = answer_of(engine, "hello", **options)
        relaxed = answer_of(engine, "hello", policy=DepthPolicy("relaxed", threshold=0.5), **options)
    assert exact.token_ids == relaxed.token_ids == full.token_ids
    assert accepted_of(exact, "grammar") == accepted_of(relaxed, "grammar") > 0
    assert exact.stats.num_accepted < exact.stats.num_drafted, "some were wrong"


@pytest.mark.parametrize(
    "policy",
    tiered(
        [DepthPolicy("relaxed", threshold=0.5), DepthPolicy("relaxed", margin=50.0)],
        [DepthPolicy("relaxed", threshold=0.5)],
    ),
)
def test_relaxed_never_leaves_the_grammar(loaded, policy):
    """Its drafts are accepted, or nearly so, whatever the model says: wrong tokens, some of which are allowed."""
    script = lambda context: ((context[-1] * 7 + len(context)) % 300, 0.95)  # noqa: E731
    reasons = set()
    for constraint in (JSON, CONSTRAINTS["tree"], CONSTRAINTS["choice"]):
        with fixed_cost_engine(loaded, ScriptedLadder(script)) as engine:
            for prompt in PROMPTS:
                answer = answer_of(engine, prompt, constraint=constraint, policy=policy)
                assert fulfils(answer, constraint)
                reasons.add(answer.finished.reason)
    assert FinishReason.EOS in reasons


@pytest.mark.parametrize(
    ("name", "way"),
    tiered(
        [(name, way) for name in ("object", "tree", "pairs") for way in ("greedy", "sampled", "penalised")],
        {("tree", "sampled")},
    ),
)
def test_an_answer_that_is_resumed_at_any_cut_is_the_same(loaded, ladder, name, way):
    options = {"constraint": CONSTRAINTS[name], "sampling": WAYS[way], "max_tokens": 60}
    with fixed_cost_engine(loaded, ladder) as engine:
        whole = answer_of(engine, "hello", policy="full", **options)
        for cut in range(1, len(whole.token_ids) + 1):
            policy = "full" if cut % 4 == 0 else "exact"
            given = whole.token_ids[:cut]
            rest = answer_of(engine, "hello", policy=policy, resumed_ids=given, **options)
            assert rest.token_ids == whole.token_ids[cut:], f"{policy} after {cut} tokens"
            assert rest.finished.reason == whole.finished.reason


def test_an_answer_outside_the_grammar_is_not_resumed(loaded, ladder):
    with fixed_cost_engine(loaded, ladder) as engine, pytest.raises(InvalidInput) as caught:
        answer_of(engine, "hello", constraint=JSON, resumed_ids=[FORBIDDEN])
    assert caught.value.reason == "CONSTRAINT_BROKEN"


@pytest.mark.parametrize("way", tiered(WAYS, {"penalised"}))
def test_a_request_that_is_put_back_goes_on_in_the_grammar(loaded, ladder, way):
    constraint = Constraint(regex="(([ab][0-9]{2})|([cd][A-Z]{2})){40}")
    options = {"constraint": constraint, "sampling": WAYS[way]}
    kv_budget_bytes = 200 * kv_token_bytes(ContiguousRunner(loaded))
    with fixed_cost_engine(loaded, ladder, kv_budget_bytes=kv_budget_bytes, max_running=1) as engine:
        whole = answer_of(engine, [7, 7], **options)
        low = GenerationRequest((7, 7), stopping=StoppingParams(max_tokens=120), priority=100, **options)
        got: list[TokenChunk | Finished] = []
        some, ended = threading.Semaphore(0), threading.Event()

        def on_event(event: Any) -> None:
            got.append(event)
            (ended.set if event is None else some.release)()

        engine.submit(low, on_event=on_event)
        for number in range(3):
            while some.acquire(blocking=False):
                pass
            some.acquire()  # it runs
            engine.generate([7, number + 1], policy="full", max_tokens=30, ignore_eos=True)
        assert ended.wait(60)
        assert engine.statistics.num_put_back >= 2
    tokens = [token.token_id for chunk in got[:-2] for token in chunk.tokens]
    assert tokens == list(whole.token_ids)


def test_a_grammar_that_takes_too_much_work_ends_its_request_alone(loaded, ladder):
    costly = Constraint(regex="((a{100}){100}){100}")
    with fixed_cost_engine(loaded, ladder) as engine:
        alone = answer_of(engine, "hello", constraint=JSON)
        other = engine.submit("hello", constraint=JSON, max_tokens=120)
        with pytest.raises(NeapError) as caught:
            answer_of(engine, "hello", constraint=costly)
        assert caught.value.reason == "CONSTRAINT_TOO_COMPLEX"
        tokens = [token for event in other.events() for token in getattr(event, "tokens", ())]
        assert tuple(token.token_id for token in tokens) == alone.token_ids


def test_constraints_are_compiled_beside_running_streams_and_by_no_thread_of_the_engine(loaded, ladder, monkeypatch):
    """While one is compiled, a stream goes on to its end."""
    threads: list[int | None] = []
    compiling, may_go_on = threading.Event(), threading.Event()
    make = compiler.ConstraintCompiler._compile

    def waiting(self: compiler.ConstraintCompiler, constraint: Constraint) -> Any:
        threads.append(threading.get_ident())
        compiling.set()
        assert may_go_on.wait(60)
        return make(self, constraint)

    monkeypatch.setattr(compiler.ConstraintCompiler, "_compile", waiting)
    with fixed_cost_engine(loaded, ladder) as engine, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(answer_of, engine, "hello", constraint=JSON)
        assert compiling.wait(60)
        stream = engine.generate("hello", policy="full", max_tokens=200, ignore_eos=True)
        assert len(stream.token_ids) == 200
        assert engine.num_waiting == engine.num_running == 0, "not queued before it is compiled"
        may_go_on.set()
        assert slow.result(60).text
        assert threads
        assert engine.thread_id not in threads


def test_a_bad_constraint_is_refused_before_anything_is_queued(loaded, ladder):
    with fixed_cost_engine(loaded, ladder) as engine:
        for options in (
            {"constraint": Constraint(regex="(")},
            {"constraint": JSON, "ignore_eos": True},
            {"constraint": JSON, "sampling": SamplingParams(min_tokens=3)},
            {"constraint": JSON, "sampling": SamplingParams(bad_words=((7,),))},
            {"constraint": "json"},
        ):
            with pytest.raises(InvalidInput):
                engine.submit("hello", **options)
        assert engine.statistics.num_requests == 0


def checked_answers(loaded: Any, ladder: Any, schemas: Sequence[dict[str, Any]], per_schema: int) -> tuple[int, int]:
    """How many answers to schemas are complete and valid, and how many are cut. There are no others."""
    num_complete = num_cut = 0

    def check(job: tuple[dict[str, Any], int]) -> Generation:
        schema, seed = job
        sampling = SamplingParams(temperature=1.0, seed=seed) if seed % 4 else SamplingParams()
        constraint = Constraint(json_schema=json.dumps(schema))
        answer = answer_of(engine, [9, seed % 250], constraint=constraint, sampling=sampling)
        assert fulfils(answer, constraint), schema
        return answer

    with fixed_cost_engine(loaded, ladder) as engine, ThreadPoolExecutor(16) as pool:
        repeated = [schema for schema in schemas for _ in range(per_schema)]
        jobs = [(schema, seed) for seed, schema in enumerate(repeated)]
        for answer in pool.map(check, jobs):
            is_complete = answer.finished.reason is FinishReason.EOS
            num_complete, num_cut = num_complete + is_complete, num_cut + (not is_complete)
    return num_complete, num_cut


def random_schemas(count: int) -> list[dict[str, Any]]:
    schemas = RandomSchemas(count)
    return [schemas.one() for _ in range(count)]


def test_every_complete_answer_to_a_random_schema_is_valid(loaded, ladder):
    num_complete, num_cut = checked_answers(loaded, ladder, random_schemas(24), 2)
    assert num_complete + num_cut == 48
    assert num_complete > 30


@pytest.mark.full
def test_every_complete_answer_to_two_thousand_schemas_is_valid(loaded, ladder):
    num_complete, _ = checked_answers(loaded, ladder, random_schemas(2000), 1)
    assert num_complete > 1800


@pytest.mark.full
def test_every_complete_answer_to_a_schema_of_kubernetes_is_valid(loaded, ladder):
    num_complete, num_cut = checked_answers(loaded, ladder, kubernetes_schemas(120), 3)
    assert num_complete + num_cut == 360
    assert num_complete > 60
