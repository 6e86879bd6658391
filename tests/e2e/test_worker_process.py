"""`python -m inference_service` as a real process."""

import json
import signal
import threading
from contextlib import closing, contextmanager

import pytest
import structlog
from neap_client import NeapClient
from neap_client.inference.v1.inference_pb2 import RouterSelector

from inference_service.servicer import SERVICE_NAME
from shared.errors import Unavailable
from shared.ladder.artefact import pack_ladder
from shared.model.load import load_model
from shared.registry.factory import open_registry
from tests.generation import EXACT, request_of
from tests.reasons import raises
from tests.waiting import wait_until
from tests.worker import build_ladder
from tests.worker_process import worker_process

pytestmark = pytest.mark.e2e
REQUEST = request_of(1500)


@contextmanager
def _worker(folder, tmp_path, *flags):
    with (
        (tmp_path / "log").open("wb") as log,
        worker_process(folder, tmp_path / "registry", *flags, stderr=log) as (process, address),
        NeapClient(address, num_attempts=1) as client,
    ):
        yield process, client


def _num_tokens(events):
    *_, last = events
    return last.finished.usage.num_completion_tokens


def test_not_serving_until_warm_then_sigterm_finishes_streams(folder, tmp_path):
    with _worker(folder, tmp_path, "--grace-s", "3600") as (process, client):
        # The port answers from the beginning, and says so to whoever asks too early.
        assert not client.is_serving(SERVICE_NAME)
        with raises(Unavailable, "NOT_READY"):
            list(client.generate(REQUEST))
        client.wait_ready(SERVICE_NAME, timeout_s=60)

        early = client.generate(REQUEST)
        next(early)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: not client.is_serving(SERVICE_NAME))
        late = client.generate(REQUEST)  # still taken: load balancers may not have noticed
        next(late)
        assert _num_tokens(early) == _num_tokens(late) == 1500
        process.send_signal(signal.SIGTERM)  # ends the grace
        assert process.wait(60) == 0
        with pytest.raises(Unavailable):
            client.get_model("tiny")
    events = [json.loads(line)["event"] for line in (tmp_path / "log").read_text().splitlines()]
    assert {"model loaded", "serving", "call ended"} <= set(events)


@pytest.mark.full
def test_the_first_requests_find_the_routers(folder, tmp_path):
    """48 at once, by the default alias and by a name, where at most 32 may wait for the registry."""
    loaded = load_model(folder, model_id="tiny")
    with closing(open_registry(str(tmp_path / "registry"))) as registry:
        manifest, blobs = pack_ladder(build_ladder(loaded), {})
        aliases = ("latest", "stable")
        registry.publish("tiny", manifest, blobs, request_id="one", aliases=aliases)
    asked = [RouterSelector(), RouterSelector(alias="stable")] * 24
    # By default one client may have 40 calls at once.
    with _worker(folder, tmp_path, "--max-active-per-client", str(len(asked))) as (_, client):
        client.wait_ready(SERVICE_NAME, timeout_s=60)
        assert [router.version for router in client.get_model("tiny").routers] == [1]
        streams = [client.generate(request_of(4, depth=EXACT, router=router)) for router in asked]
        assert {next(stream).started.router_version for stream in streams} == {1}


# Run by Python as it starts. It replaces the engine's step by one that never ends.
HANGING = """
import importlib.util, sys, threading

class Hanging:
    def find_spec(self, name, path, target=None):
        if name != "shared.engine.step":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            module.Decoder.step = lambda *_: threading.Event().wait()
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Hanging())
"""


@pytest.mark.full
def test_a_worker_whose_engine_hangs_says_where_and_ends(folder, tmp_path, monkeypatch):
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(HANGING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "start"))
    with _worker(folder, tmp_path, "--hang-timeout-s", "1") as (process, client):
        client.wait_ready(SERVICE_NAME, timeout_s=60)
        with pytest.raises(Unavailable):
            list(client.generate(REQUEST))
        assert process.wait(60) == 1
    entries = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    [entry] = [entry for entry in entries if entry["level"] == "critical"]
    assert (entry["model_id"], entry["seconds"]) == ("tiny", 1.0)
    assert "sitecustomize.py" in entry["stack"]


@pytest.mark.full
def test_a_second_sigterm_ends_at_once_and_says_why(folder, tmp_path):
    with _worker(folder, tmp_path, "--grace-s", "3600") as (process, client):
        client.wait_ready(SERVICE_NAME, timeout_s=60)
        streams = [client.generate(REQUEST) for _ in range(3)]
        for stream in streams:
            next(stream)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: not client.is_serving(SERVICE_NAME))
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        for stream in streams:
            with raises(Unavailable, "SHUTTING_DOWN"):
                list(stream)
            assert 0 < len(stream.token_ids) < 1500
        assert process.wait(60) == 0


@pytest.mark.full
def test_streams_that_outlast_the_drain_are_told(folder, tmp_path):
    flags = ("--grace-s", "0", "--drain-timeout-s", "0")
    with _worker(folder, tmp_path, *flags) as (process, client):
        client.wait_ready(SERVICE_NAME, timeout_s=60)
        stream = client.generate(REQUEST)
        next(stream)
        process.send_signal(signal.SIGTERM)
        with raises(Unavailable, "SHUTTING_DOWN"):
            list(stream)
        assert process.wait(60) == 0


@pytest.mark.full
def test_sigterm_while_loading_ends_at_once(folder, tmp_path):
    with _worker(folder, tmp_path) as (process, client):
        assert not client.is_serving()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "no model is named"),
        (["--model", "tiny=/no/such/folder"], "MODEL_NOT_FOUND"),
        (["--model", "tiny"], "ID=SOURCE"),
        (["--model", "tiny=x", "--device", "gpu"], "BAD_DEVICE"),
        (["--model", "tiny=x", "--device", "cuda:99"], "DEVICE_UNAVAILABLE"),
        (["--model", "tiny=x", "--grace-s", "nan"], "BAD_CONFIGURATION"),
        (["--model", "tiny=x", "--registry", "redis://nowhere"], "BAD_REGISTRY"),
    ],
)
def test_what_cannot_start_says_why_and_exits_with_2(flags, said, tmp_path, capfd, request):
    from inference_service.__main__ import main

    # asyncio's signal handlers want the main thread, which pytest has.
    assert threading.current_thread() is threading.main_thread()
    request.addfinalizer(structlog.reset_defaults)
    defaults = ["--listen", "127.0.0.1:0", "--data-dir", str(tmp_path)]
    assert main([*defaults, *flags]) == 2
    output = capfd.readouterr()
    assert said in output.err
    assert said != "MODEL_NOT_FOUND" or not output.out, "it says that it listens, and does not"


@pytest.mark.parametrize("flag", ["--record-passes", "--compile-layers"])
def test_a_worker_that_must_be_fast_and_cannot_refuses_to_start(flag, folder, tmp_path, capfd, request):
    from inference_service.__main__ import main

    request.addfinalizer(structlog.reset_defaults)
    asked = ["--model", f"tiny={folder}", flag, "on"]
    assert main(["--listen", "127.0.0.1:0", "--data-dir", str(tmp_path), *asked]) == 2
    assert "on cpu: only a GPU does this" in capfd.readouterr().err
