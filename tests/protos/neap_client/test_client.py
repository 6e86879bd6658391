import inspect
import threading

import pytest
from neap_client import AsyncNeapClient, NeapClient

from shared import errors
from tests.shared.rpc.conftest import SERVICE, Scripted, running
from tests.waiting import wait_until


@pytest.fixture
def client(server, make_client):
    with make_client(server.target, timeout_s=60, num_attempts=3) as client:
        yield client


def test_both_clients_have_the_same_methods():
    def methods(kind):
        return {
            name: [(one.name, one.kind, one.annotation) for one in signature.parameters.values()]
            for name, method in vars(kind).items()
            if not name.startswith("_") and (signature := inspect.signature(method))
        }

    assert methods(NeapClient) == methods(AsyncNeapClient)


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidInput("a", reason="SOME", metadata={"k": "v"}),
        errors.PromptTooLong("b"),
        errors.NotFound("c"),
        errors.AlreadyExists("d"),
        errors.RouterMismatch("e", metadata={"router_fingerprint": "x"}),
        errors.Conflict("f"),
        errors.Corrupt("g"),
        errors.Exhausted("h", retry_after_s=1.25),
        errors.Exhausted("h"),
        errors.Unavailable("i"),
        errors.Cancelled("j"),
        errors.DeadlineExceeded("k ü"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_arrive_as_they_were_raised(scripted, client, error):
    def handle(request, context):
        raise error

    scripted.on_get_model = handle
    with pytest.raises(errors.NeapError) as caught:
        client.get_model("m")
    got = caught.value
    assert type(got) is type(error)
    assert (got.message, got.reason, got.metadata) == (error.message, error.reason, error.metadata)
    assert getattr(got, "retry_after_s", None) == getattr(error, "retry_after_s", None)


def test_an_unexpected_error_is_a_bare_neap_error_with_its_id(scripted, client):
    scripted.on_get_model = lambda request, context: 1 / 0
    with pytest.raises(errors.NeapError) as caught:
        client.get_model("m")
    assert type(caught.value) is errors.NeapError
    assert caught.value.metadata["error_id"] in caught.value.message


def test_an_address_without_a_server_is_unavailable(make_client):
    with make_client("127.0.0.1:1", num_attempts=1) as client:
        with pytest.raises(errors.Unavailable) as caught:
            client.list_models()
        assert caught.value.reason == "GRPC_UNAVAILABLE"
        with pytest.raises(errors.Unavailable, match="not serving after"):
            client.wait_ready(timeout_s=0.3)


@pytest.mark.parametrize(("error", "num_calls"), [("Unavailable", 3), ("InvalidInput", 1)])
def test_idempotent_calls_are_repeated_only_when_unavailable(scripted, client, error, num_calls):
    def handle(request, context):
        raise getattr(errors, error)("no")

    scripted.on_get_model = handle
    with pytest.raises(getattr(errors, error)):
        client.get_model("m")
    assert scripted.num_calls == num_calls


def test_wait_ready_returns_when_serving(server, client):
    assert not client.is_serving()
    threading.Timer(0.2, lambda: server.run(server.server.set_serving())).start()
    client.wait_ready("neap.inference.v1.InferenceService", timeout_s=60)
    assert client.is_serving("neap.inference.v1.InferenceService")


def test_addresses_that_do_not_serve_get_no_calls(scripted, server, make_client):
    other = Scripted()
    with running(other) as serving:
        serving.run(serving.server.set_serving())
        target = f"ipv4:{server.target},{serving.target}"
        with make_client(target, health_service="", num_attempts=1) as client:
            client.wait_ready(SERVICE, timeout_s=60)
            for _ in range(6):
                client.get_model("m")
            assert (scripted.num_calls, other.num_calls) == (0, 6)
            server.run(server.server.set_serving())
            wait_until(lambda: client.get_model("m") is not None and scripted.num_calls)
