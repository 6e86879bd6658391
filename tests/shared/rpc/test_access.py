"""Access control: the table of roles against the existing services, and what refused callers see."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from neap_client.inference.v1 import inference_pb2, inference_pb2_grpc
from structlog.testing import capture_logs

from shared.errors import PermissionDenied, Unauthenticated
from shared.rpc.access import METHOD_ROLES, OPEN_METHODS, Access
from shared.rpc.callers import Role, current_caller
from shared.rpc.interceptors import ServiceInterceptor
from shared.rpc.security import ServerSecurity
from tests.shared.rpc.conftest import running
from tests.tokens import bearer, write_tokens
from tests.waiting import wait_until

PROTOS = Path(__file__).resolve().parents[3] / "protos"
Code = grpc.StatusCode
# Repeated here so that the table cannot change by accident.
ONLY = {
    "generate": {"Generate", "Tokenize", "Abort", "GetTokenizer"},
    "calibrate": {"CreateCalibration", "ReportServed"},
    "admin": {"SetAlias", "SetCanary", "PromoteCanary", "RollbackAlias", "BeginTrial", "OrderJudge"},
}
JOBS = {"GetCalibration", "ListCalibrations", "CancelCalibration", "RetryCalibration", "WatchCalibration"}


def methods():
    """Full names of every method of every service that neap's protos define."""
    for path in sorted(PROTOS.glob("neap/**/*.proto")):
        parts = path.relative_to(PROTOS / "neap").with_suffix("").parts
        module = ".".join(("neap_client", *parts)) + "_pb2"
        for service in import_module(module).DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}"


def test_every_method_of_every_service_has_its_roles():
    ours = set(methods())
    assert len(ours) == 23
    reflection = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
    theirs = {f"/{reflection.full_name}/{method.name}" for method in reflection.methods}
    # Those of vLLM's dialect are in tests/inference_service/test_vllm_dialect.py.
    assert {name for name in METHOD_ROLES if not name.startswith("/vllm.")} == ours | theirs
    assert all(METHOD_ROLES.values())
    health = health_pb2.DESCRIPTOR.services_by_name["Health"]
    assert f"/{health.full_name}/" == OPEN_METHODS


@pytest.mark.parametrize("role", Role)
def test_each_role_may_call_what_it_is_for(tmp_path, role):
    tokens = write_tokens(tmp_path / "tokens")
    access = Access(tmp_path / "tokens")
    denied = set().union(*(ONLY[other] for other in ONLY if other != role))
    if role is Role.GENERATE:
        denied |= JOBS
    for method in METHOD_ROLES:
        verdict = access.check_call(method, bearer(tokens[role]))
        if method.rpartition("/")[2] in denied:
            assert isinstance(verdict, PermissionDenied), method
        else:
            assert verdict.name == role, method
        assert access.check_call(method, bearer(tokens["all"])).name == "all"
        assert isinstance(access.check_call(method, ()), Unauthenticated)


def test_a_method_without_roles_is_refused_to_everybody(tmp_path):
    tokens = write_tokens(tmp_path / "tokens")
    access = Access(tmp_path / "tokens")
    verdict = access.check_call("/neap.inference.v1.InferenceService/New", bearer(tokens["all"]))
    assert isinstance(verdict, PermissionDenied)


@pytest.fixture
def guarded(scripted, tmp_path):
    """A server that requires tokens, the `tokens` by name, and their `file`."""
    file = tmp_path / "tokens"
    tokens = write_tokens(file)
    with running(scripted, security=ServerSecurity(access=Access(file))) as server:
        server.tokens, server.file = tokens, file
        with grpc.insecure_channel(server.target) as server.channel:
            server.stub = inference_pb2_grpc.InferenceServiceStub(server.channel)
            yield server


def _refusal(call):
    with pytest.raises(grpc.RpcError) as caught:
        call()
    status, info = rpc_status.from_call(caught.value), error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "neap"
    return caught.value.code(), info.reason


def _get(server, metadata=()):
    return server.stub.GetModel(inference_pb2.GetModelRequest(model_id="x"), metadata=metadata, timeout=60)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ((), "TOKEN_MISSING"),
        ((("authorization", "Basic YTpi"),), "TOKEN_MALFORMED"),
        ((("authorization", "Bearer"),), "TOKEN_MALFORMED"),
        ((*bearer("a"), *bearer("b")), "TOKEN_MALFORMED"),
        (bearer(""), "TOKEN_UNKNOWN"),
        (bearer("neap_wrong"), "TOKEN_UNKNOWN"),
        (bearer("x" * 4000), "TOKEN_UNKNOWN"),
    ],
)
def test_unauthenticated_callers_are_refused_before_their_message_is_read(guarded, scripted, metadata, reason):
    assert _refusal(lambda: _get(guarded, metadata)) == (Code.UNAUTHENTICATED, reason)
    garbage = guarded.channel.unary_unary("/neap.inference.v1.InferenceService/GetModel")
    refused = _refusal(lambda: garbage(b"\xff\xff", metadata=metadata, timeout=60))
    assert refused == (Code.UNAUTHENTICATED, reason)
    stream = guarded.stub.Generate(inference_pb2.GenerateRequest(), metadata=metadata, timeout=60)
    assert _refusal(lambda: list(stream)) == (Code.UNAUTHENTICATED, reason)
    assert scripted.num_calls == 0
    assert guarded.server.security.access.refusals == {reason: 3}


@pytest.mark.parametrize("name", ["all", "nobody"])
async def test_only_a_callers_message_is_parsed(tmp_path, name):
    tokens, parsed = write_tokens(tmp_path / "tokens"), []

    async def handle(request, context):
        raise AssertionError("nothing is called here")

    async def handler_of(details):
        return grpc.unary_unary_rpc_method_handler(handle, request_deserializer=parsed.append)

    details = SimpleNamespace(
        method="/neap.inference.v1.InferenceService/GetModel",
        invocation_metadata=bearer(tokens.get(name, "neap_wrong")),
    )
    interceptor = ServiceInterceptor(Access(tmp_path / "tokens"))
    handler = await interceptor.intercept_service(handler_of, details)
    handler.request_deserializer(b"message")
    assert parsed == ([b"message"] if name == "all" else [])


def test_a_caller_without_the_role_is_told_which(guarded, scripted):
    call = guarded.stub.Generate(inference_pb2.GenerateRequest(), metadata=bearer(guarded.tokens["admin"]), timeout=60)
    assert _refusal(lambda: list(call)) == (Code.PERMISSION_DENIED, "ROLE_MISSING")
    assert "generate" in call.details()
    assert scripted.num_calls == 0


def test_the_caller_is_known_to_the_handler_and_the_log(guarded, scripted):
    seen = []
    scripted.on_get_model = lambda request, context: seen.append(current_caller())
    with capture_logs() as logs:
        _get(guarded, (("authorization", f"bearer {guarded.tokens['admin']}"),))
        _refusal(lambda: _get(guarded, bearer("neap_wrong")))
        denied = guarded.stub.Generate(
            inference_pb2.GenerateRequest(), metadata=bearer(guarded.tokens["admin"]), timeout=60
        )
        _refusal(lambda: list(denied))
        wait_until(lambda: len(logs) == 3)  # a client gets its answer before the line is written
    assert [caller.name for caller in seen] == ["admin"]
    known, stranger, denied = [line for line in logs if line["event"] == "call ended"]
    assert known["caller"] == "admin"
    assert (stranger["code"], stranger["reason"]) == ("UNAUTHENTICATED", "TOKEN_UNKNOWN")
    assert stranger["peer"].startswith("ipv4:127.0.0.1:")
    assert (denied["caller"], denied["reason"]) == ("admin", "ROLE_MISSING")
    assert "neap_" not in str(logs)


def test_tokens_are_added_and_removed_while_the_server_runs(guarded):
    old = bearer(guarded.tokens["all"])
    _get(guarded, old)
    new = bearer(write_tokens(guarded.file)["all"])
    _get(guarded, new)
    assert _refusal(lambda: _get(guarded, old)) == (Code.UNAUTHENTICATED, "TOKEN_UNKNOWN")


@pytest.mark.parametrize("broken", [b"", b"ann admin neap_not-a-digest", None])
def test_an_unusable_file_leaves_the_previous_tokens_in_use(guarded, broken):
    mine = bearer(guarded.tokens["all"])
    whole = guarded.file.read_bytes()
    with capture_logs() as logs:
        guarded.file.unlink() if broken is None else guarded.file.write_bytes(broken)
        _get(guarded, mine)
        _get(guarded, mine)
        guarded.file.write_bytes(whole)
        _get(guarded, mine)
    lines = [line for line in logs if line["event"] == "tokens not reloaded"]
    assert len(lines) == guarded.server.security.access.files.num_refused == 1
    assert "not-a-digest" not in str(lines)


def test_health_is_open_and_reflection_is_not(guarded):
    check = health_pb2_grpc.HealthStub(guarded.channel).Check
    assert check(health_pb2.HealthCheckRequest(), timeout=60).status
    reflect = reflection_pb2_grpc.ServerReflectionStub(guarded.channel).ServerReflectionInfo
    asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
    refused = _refusal(lambda: list(reflect(iter(asked), timeout=60)))
    assert refused == (Code.UNAUTHENTICATED, "TOKEN_MISSING")
    (listed,) = reflect(iter(asked), timeout=60, metadata=bearer(guarded.tokens["generate"]))
    assert listed.list_services_response.service
