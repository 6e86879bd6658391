"""What `neap up` says of a model's router and of a worker, and what it makes of --model. As processes: tests/e2e."""

import os
import signal
from contextlib import suppress
from types import SimpleNamespace

import pytest
from neap_client import NeapClient
from neap_client.calibration.v1 import calibration_pb2 as pb
from neap_client.router.v1 import router_pb2

from neap_engine.cli import up as module
from neap_engine.cli.processes import interrupt_on_signals
from neap_engine.cli.up import learned, named_source, newer, share_flags, watch
from shared.errors import NotFound
from shared.worker_settings import WorkerSettings
from tests.neap_engine.cli.conftest import refuse


@pytest.fixture
def states(service, monkeypatch):
    """Calls `learned` with some budget, and returns all that it says."""
    with NeapClient(service.address, num_attempts=1) as client:
        yield lambda budget_s: [*learned(client, client, "tiny", budget_s)]


def without_router(service, monkeypatch) -> None:
    monkeypatch.setattr(
        service.routers,
        "GetVersion",
        lambda _, context: refuse(context, NotFound("no alias latest", reason="ALIAS_NOT_FOUND")),
    )


def test_a_router_of_the_model_is_used_again(service, states, monkeypatch):
    version = service.routers.version(2)
    version.model_fingerprint = service.inference.model().fingerprint
    monkeypatch.setattr(service.routers, "version", lambda number: version)
    assert states(60) == ["router 2"]
    assert service.calibration.spec is None


def test_a_router_of_another_revision_is_learned_anew(service, states, capsys):
    del service.calibration.states[:-1]  # no job is unfinished
    assert states(60)[-1].startswith("router 7 was learned")
    assert "another revision of the model" in capsys.readouterr().out
    assert service.calibration.spec.time_budget.seconds == 60
    assert service.calibration.spec.aliases == ["latest"]


def test_what_an_earlier_start_has_left_is_waited_for(service, states, monkeypatch):
    without_router(service, monkeypatch)
    said = states(60)
    assert said[0] == "learning a router: collecting, 25%"
    assert said[-1].startswith("router 7 was learned")
    assert service.calibration.spec is None


def test_none_is_learned_without_a_budget(service, states, monkeypatch):
    without_router(service, monkeypatch)
    service.calibration.states = [{"state": pb.STATE_CANCELLED}]
    assert states(0) == ["no router; `neap calibrate` learns one"]
    assert service.calibration.spec is None


def test_why_none_was_learned_is_said(service, states, monkeypatch):
    without_router(service, monkeypatch)
    failure = {"reason": "DISK_FULL", "message": "the disk is full"}
    service.calibration.states[-1] = {"state": pb.STATE_FAILED, "failure": failure}
    assert states(60)[-1] == "no router was learned: the disk is full [DISK_FULL]"


def test_what_becomes_of_the_alias_later_is_said(service, monkeypatch):
    monkeypatch.setattr(module, "NEWER_POLL_S", 0.0)
    service.routers.history = None
    served = {"source": {"kind": "ServedTraffic", "pool": "default"}}
    service.routers.manifests[2] = {"calibration": {"spec": served, "tokens": {"total": 1200, "report": 200}}}
    change = service.routers.change
    with NeapClient(service.address, num_attempts=1) as client:
        said = newer(client, "tiny")
        assert next(said) == ""
        service.routers.history = [change(0, 1, "")]
        assert next(said).startswith("router 1 came; learned from 579,860 tokens; guessed right")
        service.routers.canary = router_pb2.Canary(version=2, share_per_mille=50)
        service.routers.history.append(change(1, 1, "trial begins"))
        service.routers.canary = None
        service.routers.history += [change(1, 2, ""), change(2, 1, "slower")]
        expected = [
            "stable: 1, 5% to 2; trial begins",
            "router 2 was learned from what was served; learned from 1,000 tokens",
        ]
        assert [next(said) for _ in range(4)] == [*expected, "stable: 2 -> 1; slower", ""]


def test_what_was_there_at_the_start_is_not_news(service, monkeypatch):
    monkeypatch.setattr(module, "NEWER_POLL_S", 0.0)
    with NeapClient(service.address, num_attempts=1) as client:
        said = newer(client, "tiny")
        assert [next(said) for _ in range(2)] == ["", ""]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("a=owner/Name-1.5B", ("a", "owner/Name-1.5B")),
        ("owner/Name-1.5B", ("name-1.5b", "owner/Name-1.5B")),
        ("Model Q4_K.gguf", ("model-q4_k", "{here}/Model Q4_K.gguf")),
        ("x=Model Q4_K.gguf", ("x", "{here}/Model Q4_K.gguf")),
        ("...", ("model", "...")),
    ],
)
def test_a_model_is_named_by_its_source(model, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Model Q4_K.gguf").touch()
    assert named_source(model) == (expected[0], expected[1].format(here=tmp_path))


@pytest.mark.parametrize(
    ("variables", "flags"),
    [
        ({"NEAP_DEVICE": "cuda:1"}, ("--gpu-memory-share", "0.45")),
        ({"NEAP_DEVICE": "cuda", "NEAP_GPU_MEMORY_SHARE": "0.6"}, ()),
        ({"NEAP_DEVICE": "cpu"}, ()),
    ],
)
def test_a_gpu_has_room_for_the_calibrator(monkeypatch, variables, flags):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert share_flags(WorkerSettings()) == flags


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_python_drops_ends_it_all_the_same(number, monkeypatch, capsys):
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(module, "POLL_S", 0.0)

    def states():
        with suppress(KeyboardInterrupt):  # as in a destructor
            os.kill(os.getpid(), number)
            signal.pause()
        for look in range(3):
            yield f"look {look}"
        raise AssertionError("it goes on")

    view = SimpleNamespace(line=lambda: "", begin_again=lambda: None)
    try:
        watch([], view, states(), module.out, interrupt_on_signals())
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    said = capsys.readouterr()
    assert "ending" in said.out + said.err
