"""What can be wrong with a request: each reason is provoked over gRPC, HTTP and the command line, of one real worker.

What else a face refuses by itself, and what goes wrong elsewhere, is in the tests of that place.
"""

from typing import Any, NamedTuple

import pytest
from grpc import StatusCode
from neap_client.inference.v1 import inference_pb2 as pb
from typer.testing import CliRunner

from neap_engine.cli.main import app
from tests.gateways import gateway_to
from tests.generation import refused, request_of
from tests.worker import CONTEXT_LENGTH

INVALID, MISSING, NOT_NOW = StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND, StatusCode.FAILED_PRECONDITION
STATUSES = {INVALID: 400, MISSING: 404, NOT_NOW: 400}
RELAXED = pb.DepthPolicy(relaxed=pb.Relaxed())
LONG = "x" * (CONTEXT_LENGTH + 1)


class Case(NamedTuple):
    """`changes` of a request over gRPC, `body` of a completion, `flags` of `neap generate`. None: that face has no such
    field. `says`: a part of the message. `prompt`: of the command."""

    reason: str
    code: StatusCode
    says: str
    changes: dict[str, Any]
    body: dict[str, Any] | None
    flags: tuple[str, ...] | None
    prompt: str = "hello"


def sampled(**fields: Any) -> Case:
    """A number of Sampling outside its limits."""
    ((name, value),) = fields.items()
    flag = (f"--{name.replace('_', '-')}", str(value))
    return Case("INVALID_INPUT", INVALID, name, {"sampling": pb.Sampling(**fields)}, fields, flag)


def exact_with(**router: Any) -> dict[str, Any]:
    return {"depth": pb.DepthPolicy(), "router": pb.RouterSelector(**router)}


CASES = [
    Case("MODEL_NOT_FOUND", MISSING, "tiny", {"model_id": "nobody"}, {"model": "nobody"}, ("--model", "nobody")),
    Case("EMPTY_PROMPT", INVALID, "empty", {"text": ""}, {"prompt": [[]]}, ("--raw",), ""),
    Case("PROMPT_TOO_LONG", INVALID, str(CONTEXT_LENGTH), {"text": LONG}, {"prompt": LONG}, ("--raw",), LONG),
    Case("PROMPT_TOO_LONG", INVALID, "tokens", {"token_ids": pb.TokenIds(ids=[97] * CONTEXT_LENGTH)}, None, None),
    Case(
        "MAX_TOKENS_TOO_LARGE",
        INVALID,
        "",
        {"stopping": pb.Stopping(max_tokens=CONTEXT_LENGTH)},
        {"max_tokens": CONTEXT_LENGTH},
        ("--max-tokens", str(CONTEXT_LENGTH)),
    ),
    Case("TOKEN_OUT_OF_RANGE", INVALID, "", {"token_ids": pb.TokenIds(ids=[2**32 - 1])}, {"prompt": [2**32 - 1]}, None),
    Case(
        "TOKEN_OUT_OF_RANGE",
        INVALID,
        "",
        {"stopping": pb.Stopping(stop_token_ids=[2**32 - 1])},
        {"stop_token_ids": [2**32 - 1]},
        ("--stop-token-ids", str(2**32 - 1)),
    ),
    Case(
        "TOKEN_OUT_OF_RANGE",
        INVALID,
        "",
        {"sampling": pb.Sampling(logit_bias={2**32 - 1: 1.0})},
        {"logit_bias": {str(2**32 - 1): 1.0}},
        ("--logit-bias", f"{2**32 - 1}=1"),
    ),
    Case(
        "INVALID_INPUT",
        INVALID,
        "min_layers",
        {"depth": pb.DepthPolicy(min_layers=99)},
        {"neap": {"min_layers": 99}},
        ("--min-layers", "99"),
    ),
    sampled(temperature=-0.5),
    sampled(top_p=1.5),
    sampled(min_p=2.0),
    sampled(repetition_penalty=0.001),
    sampled(presence_penalty=2.5),
    Case(
        "ROUTER_REQUIRED",
        NOT_NOW,
        "neap calibrate",
        {"depth": RELAXED},
        {"neap": {"policy": "relaxed"}},
        ("--policy", "relaxed"),
    ),
    Case(
        "ALIAS_NOT_FOUND",
        MISSING,
        "next",
        exact_with(alias="next"),
        {"neap": {"router_alias": "next"}},
        ("--router", "next"),
    ),
    Case(
        "ROUTER_VERSION_NOT_FOUND",
        MISSING,
        "7",
        exact_with(version=7),
        {"neap": {"router_version": 7}},
        ("--router", "7"),
    ),
    Case("BAD_ALIAS", INVALID, "", exact_with(alias="a b"), {"neap": {"router_alias": "a b"}}, ("--router", "a b")),
    Case(
        "MARGIN_NEEDS_GREEDY",
        INVALID,
        "greedy",
        {"depth": pb.DepthPolicy(relaxed=pb.Relaxed(margin=1.0)), "sampling": pb.Sampling(temperature=1.0)},
        {"neap": {"policy": "relaxed", "margin": 1.0}, "temperature": 1.0},
        ("--policy", "relaxed", "--margin", "1", "--temperature", "1"),
    ),
    Case(
        "CONSTRAINT_INVALID",
        INVALID,
        "",
        {"constraint": pb.Constraint(regex="(")},
        {"structured_outputs": {"regex": "("}},
        None,
    ),
]


@pytest.fixture
def gateway(worker):
    with gateway_to(worker.target, generation_defaults="openai") as gateway:
        yield gateway


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.reason} {'+'.join(case.changes)}")
def test_each_face_says_the_reason(case, stub, gateway, worker, engine):
    code, info, message = refused(stub, request_of(**case.changes))
    assert (code, info.reason) == (case.code, case.reason)
    assert message
    assert case.says in message
    if case.body is not None:
        reply = gateway.http.post(
            "/v1/completions", json={"model": "tiny", "prompt": "hello", "temperature": 0} | case.body
        )
        error = reply.json()["error"]
        assert (reply.status_code, error["neap"]["reason"]) == (STATUSES[case.code], case.reason), reply.text
        assert case.says in error["message"]
    if case.flags is not None:
        command = ["generate", case.prompt, "--worker", worker.target, "--raw", *case.flags]
        result = CliRunner().invoke(app, [*command, *(() if "--model" in case.flags else ("--model", "tiny"))])
        assert result.exit_code == 1, result.output
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
        assert f"[{case.reason}" in result.stderr or case.reason == "INVALID_INPUT"
        assert case.says in result.stderr
    assert engine.num_running == engine.num_waiting == 0
