"""Constrained answers over real gRPC: every form, every policy, many at once, resumed, and refused."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import jsonschema
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.inference.v1 import inference_pb2_grpc

from inference_service.pools import NUM_CONSTRAINT_THREADS
from shared.constraints.compiler import ConstraintCompiler
from shared.registry.factory import open_registry
from tests.constrained import CONSTRAINTS, OBJECT, TREE, build_loaded
from tests.fixed_costs import fixed_cost_engine
from tests.generation import EXACT, FULL, answer, publish, refused, request_of
from tests.tiers import tiered
from tests.worker import EOS, serving

SAMPLED = pb.Sampling(temperature=1.0, seed=5)
FORMS = {
    "json_schema": pb.Constraint(json_schema=json.dumps(OBJECT)),
    "recursive": pb.Constraint(json_schema=json.dumps(TREE)),
    "regex": pb.Constraint(regex=CONSTRAINTS["pairs"].regex),
    "lark": pb.Constraint(lark=CONSTRAINTS["lark"].lark),
    "choice": pb.Constraint(choice=pb.Choice(texts=CONSTRAINTS["choice"].choice)),
    "json_object": pb.Constraint(json_object=pb.JsonObject()),
}
STOPPING = pb.Stopping(max_tokens=120)


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    registry = open_registry(str(tmp_path_factory.mktemp("registry")))
    with fixed_cost_engine(build_loaded()) as engine:
        publish(registry, engine)
        with serving(engine, registry) as worker, grpc.insecure_channel(worker.target) as channel:
            yield inference_pb2_grpc.InferenceServiceStub(channel)
    registry.close()


def test_a_known_constraint_does_not_wait_while_others_are_compiled(stub, monkeypatch):
    known = request_of(constraint=FORMS["regex"], depth=FULL, stopping=STOPPING)
    answer(stub, known)
    compiling, may_go_on, own = threading.Semaphore(0), threading.Event(), ConstraintCompiler._try

    def waiting(self, constraint):
        compiling.release()
        assert may_go_on.wait(60)
        return own(self, constraint)

    monkeypatch.setattr(ConstraintCompiler, "_try", waiting)
    new = [pb.Constraint(regex=f"a{{{count}}}") for count in range(3, 3 + NUM_CONSTRAINT_THREADS)]
    with ThreadPoolExecutor(len(new)) as pool:
        slow = [pool.submit(answer, stub, request_of(constraint=own, depth=FULL, stopping=STOPPING)) for own in new]
        try:
            assert all(compiling.acquire(timeout=60) for _ in new)
            answer(stub, known)
            assert not any(one.done() for one in slow)
        finally:
            may_go_on.set()
        for one in slow:
            one.result(60)


def ids(tokens):
    return [token.id for token in tokens]


@pytest.mark.parametrize("sampling", tiered([None, SAMPLED], [SAMPLED]), ids=["greedy", "sampled"])
def test_every_form_under_every_policy_alone_and_in_company(stub, sampling):
    def ask(job):
        form, depth = job
        request = request_of(constraint=FORMS[form], depth=depth, sampling=sampling, stopping=STOPPING)
        _, tokens, texts, finished = answer(stub, request)
        return ids(tokens), "".join(texts) + finished.text, finished

    jobs = [(form, depth) for form in FORMS for depth in (FULL, EXACT)]
    alone = [ask(job) for job in jobs]
    with ThreadPoolExecutor(len(jobs)) as pool:
        together = list(pool.map(ask, jobs))
    num_complete = 0
    for job, own, other in zip(jobs, alone, together, strict=True):
        assert own[:2] == other[:2], job
    for (form, _), full, exact in zip(jobs[::2], alone[::2], alone[1::2], strict=True):
        tokens, text, finished = full
        assert exact[:2] == full[:2], form
        assert exact[2].reason == finished.reason
        is_complete = finished.reason == pb.FINISH_REASON_EOS
        assert (tokens[-1] == EOS) == is_complete
        assert is_complete or finished.reason == pb.FINISH_REASON_LENGTH
        if is_complete and "json_schema" in (form, FORMS[form].WhichOneof("form")):
            jsonschema.validate(json.loads(text), json.loads(FORMS[form].json_schema))
        if is_complete and form == "choice":
            assert text in CONSTRAINTS["choice"].choice
        num_complete += is_complete
    assert num_complete >= 3
    forced = [count for _, _, end in alone for count in end.depth.exits if count.proposer == "grammar"]
    assert sum(count.num_tokens for count in forced) > 20


def test_an_answer_is_cut_where_its_tokens_end(stub):
    request = request_of(constraint=FORMS["json_schema"], depth=EXACT, stopping=pb.Stopping(max_tokens=7))
    _, tokens, _, finished = answer(stub, request)
    assert (len(tokens), finished.reason) == (7, pb.FINISH_REASON_LENGTH)


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
def test_an_answer_goes_on_in_its_grammar(stub, sampling):
    """As another worker goes on with it."""
    request = request_of(constraint=FORMS["json_schema"], depth=EXACT, sampling=sampling, stopping=STOPPING)
    started, tokens, _, finished = answer(stub, request)
    assert len(tokens) > 20
    request.sampling.seed = started.seed
    for cut in range(1, len(tokens), 5):
        request.resume.CopyFrom(pb.Resume(token_ids=ids(tokens[:cut])))
        _, rest, _, end = answer(stub, request)
        assert ids(rest) == ids(tokens[cut:])
        assert end.reason == finished.reason


@pytest.mark.parametrize(
    ("constraint", "field", "place"),
    [
        (pb.Constraint(json_schema='{"type": "objekt"}'), "constraint.json_schema", "objekt"),
        (pb.Constraint(lark="start: b"), "constraint.lark", "1(8)"),
        (pb.Constraint(choice=pb.Choice()), "constraint.choice", "at least one"),
        (pb.Constraint(), "constraint", "exactly one"),
    ],
)
def test_a_bad_constraint_is_refused_with_its_place_before_the_request_starts(stub, constraint, field, place):
    with pytest.raises(grpc.RpcError) as caught:
        next(iter(stub.Generate(request_of(constraint=constraint))))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(caught.value)
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad)
    assert info.reason == "CONSTRAINT_INVALID"
    assert bad.field_violations[0].field == field
    assert place in status.message


def test_a_model_without_a_tokenizer_refuses(tmp_path):
    registry = open_registry(str(tmp_path))
    loaded = replace(build_loaded(), tokenizer=None)
    with (
        fixed_cost_engine(loaded) as engine,
        serving(engine, registry) as worker,
        grpc.insecure_channel(worker.target) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = request_of(constraint=FORMS["regex"], token_ids=pb.TokenIds(ids=[1, 2]))
        code, info, _ = refused(stub, request)
    registry.close()
    assert (code, info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "NO_TOKENIZER")
