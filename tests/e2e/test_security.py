"""A worker that asks for certificates and tokens, as its clients and its command line meet it."""

import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import trustme
from neap_client import ClientSecurity, NeapClient
from prometheus_client import CollectorRegistry, generate_latest
from typer.testing import CliRunner

from neap_engine.cli.main import app
from shared.engine.engine import Engine
from shared.errors import Exhausted, PermissionDenied, Unauthenticated
from shared.model.load import load_model
from shared.registry.factory import open_registry
from shared.rpc.access import Access
from shared.rpc.callers import Role
from shared.rpc.certificates import ServerCertificate
from shared.rpc.security import SecurityCollector, ServerSecurity
from tests.certificates import issued, write
from tests.generation import request_of
from tests.tokens import write_tokens
from tests.worker import save_model, serving

pytestmark = pytest.mark.e2e
CALLERS = {"ann": (Role.GENERATE,), "bob": (Role.GENERATE,), "ops": (Role.ADMIN,)}


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worker")
    authority = trustme.CA()
    files = write(folder / "server", issued(authority, "127.0.0.1"))
    mine = write(folder / "client", issued(authority, "client@example.org"))
    tokens = write_tokens(folder / "tokens", CALLERS)
    certificate = ServerCertificate(files.certificate, files.key, files.authority)
    security = ServerSecurity(certificate, Access(folder / "tokens"))
    registry = open_registry(str(folder / "registry"))
    loaded = load_model(save_model(folder / "model"), model_id="tiny")
    with Engine(loaded) as engine, serving(engine, registry, max_active_per_client=1, security=security) as worker:
        worker.security, worker.tokens, worker.folder = security, tokens, folder
        worker.mine, worker.authority = mine, files.authority
        yield worker
    registry.close()


def _client(worker, token, **changes):
    identity = {"certificate": worker.mine.certificate, "key": worker.mine.key}
    security = ClientSecurity(ca=worker.authority, token=token, **{**identity, **changes})
    return NeapClient(worker.target, security=security, num_attempts=1)


def test_each_caller_has_places_of_its_own_at_one_address(worker):
    with (
        _client(worker, worker.tokens["ann"]) as ann,
        _client(worker, worker.tokens["bob"]) as bob,
        ann.generate(request_of(2000)) as long,
    ):
        next(long)
        with pytest.raises(Exhausted) as caught:
            list(ann.generate(request_of(3)))
        assert caught.value.reason == "CLIENT_LIMIT"
        assert sum(len(event.chunk.tokens) for event in bob.generate(request_of(3))) == 3


def test_the_engine_is_told_who_asks(worker, monkeypatch):
    asked, submit = [], worker.engine.submit

    def spied(request, *arguments, **options):
        asked.append(request.client)
        return submit(request, *arguments, **options)

    monkeypatch.setattr(worker.engine, "submit", spied)
    for name in ("ann", "bob"):
        with _client(worker, worker.tokens[name]) as client:
            list(client.generate(request_of(1)))
    assert asked == ["ann", "bob"]


def test_what_is_refused_is_counted_and_what_is_off_is_not_exported(worker):
    with _client(worker, worker.tokens["ops"]) as ops, pytest.raises(PermissionDenied):
        list(ops.generate(request_of(3)))
    with _client(worker, "neap_wrong") as eve, pytest.raises(Unauthenticated):
        eve.list_models()
    registry = CollectorRegistry()
    registry.register(SecurityCollector(worker.security))
    text = generate_latest(registry).decode()
    assert 'neap_unauthorized_calls_total{reason="TOKEN_UNKNOWN"} 1.0' in text
    assert 'neap_unauthorized_calls_total{reason="ROLE_MISSING"} 1.0' in text
    assert 'neap_security_reloads_total{kind="tokens",result="refused"} 0.0' in text
    (line,) = [line for line in text.splitlines() if line.startswith("neap_tls_")]
    assert float(line.split()[1]) == worker.security.certificate.expiry_time_s > time.time()
    nothing = CollectorRegistry()
    nothing.register(SecurityCollector(ServerSecurity()))
    assert generate_latest(nothing) == b""


@pytest.fixture
def neap(worker, monkeypatch):
    """Runs `neap generate` against the worker, with what each test puts in flags and environment."""
    variables = SimpleNamespace(set=lambda name, value: monkeypatch.setenv(name, str(value)))
    monkeypatch.delenv("NEAP_TOKEN", raising=False)

    def run(*flags):
        arguments = ["generate", "hello", "--policy", "full", "--max-tokens", "2"]
        return CliRunner().invoke(app, [*flags, *arguments, "--worker", worker.target])

    return SimpleNamespace(run=run, set=variables.set)


def test_the_command_line_by_flags(worker, neap, tmp_path):
    token = tmp_path / "token"
    token.write_text(worker.tokens["ann"] + "\n")
    flags = ["--tls-ca", str(worker.authority), "--tls-cert", str(worker.mine.certificate)]
    flags += ["--tls-key", str(worker.mine.key)]
    result = neap.run(*flags, "--token-file", str(token))
    assert result.exit_code == 0, result.output
    assert "2 tokens" in result.stderr


def test_the_command_line_by_variables(worker, neap):
    neap.set("NEAP_CLIENT_CA", worker.authority)
    neap.set("NEAP_CLIENT_CERT", worker.mine.certificate)
    neap.set("NEAP_CLIENT_KEY", worker.mine.key)
    neap.set("NEAP_TOKEN", worker.tokens["bob"])
    result = neap.run()
    assert result.exit_code == 0, result.output
    neap.set("NEAP_TOKEN", worker.tokens["ops"])
    refused = neap.run()
    assert (refused.exit_code, "ROLE_MISSING" in refused.stderr) == (1, True)
    assert worker.tokens["ops"] not in refused.output
    neap.set("NEAP_CLIENT_KEY", "")
    assert "BAD_CONFIGURATION" in neap.run().stderr


def test_the_document_explains_every_metric(worker):
    registry = CollectorRegistry()
    registry.register(SecurityCollector(worker.security))
    text = (Path(__file__).resolve().parents[2] / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| `(neap_\w+)(?:\{([^}]*)\})?` \|", text, re.M)
    exported = {(sample.name, ",".join(sample.labels)) for family in registry.collect() for sample in family.samples}
    assert set(rows) == exported
