"""A version that drafts as its alias' own does is put on trial in real processes: it grows, and the trial ends without
a difference by what the worker measures, although the calibrator is killed on the way."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from neap_client import NeapClient
from neap_client.router.v1 import router_pb2 as pb

from neap_engine.cli.processes import ServiceProcess
from shared.ladder.artefact import pack_ladder
from shared.ladder.ladder import Ladder, ModelIdentity
from shared.ladder.table_confidence import SIZES, TableConfidence
from shared.model.load import load_model
from shared.registry.factory import open_registry
from tests.e2e import test_rollout_cycle
from tests.e2e.test_rollout_cycle import READY_TIMEOUT_S, Load
from tests.generation import EXACT, FULL, request_of
from tests.waiting import wait_until
from tests.worker import save_model

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1500)]
TRIAL_TIMEOUT_S = 600.0
PROMPT, MAX_TOKENS = "hello hello hello", 48


def ask(client: NeapClient, request_id: str, policy: str = "exact") -> tuple[int, tuple[int, ...]]:
    request = request_of(MAX_TOKENS, text=PROMPT, depth=FULL if policy == "full" else EXACT)
    stream = client.generate(request, request_id=request_id, timeout_s=60)
    started = next(stream).started
    list(stream)
    return started.router_version, tuple(stream.token_ids)


@pytest.fixture
def registry(tmp_path: Path) -> str:
    """With two versions of one look-up, of which "stable" names the first."""
    loaded = load_model(save_model(tmp_path / "model"), model_id="tiny")
    url = str(tmp_path / "registry")
    opened = open_registry(url)
    for number in (1, 2):
        ladder = Ladder(
            model=ModelIdentity.of(loaded), lookup_confidence=TableConfidence(0.0, [[0.0] * size for size in SIZES])
        )
        manifest, blobs = pack_ladder(ladder, {"number": number})
        aliases = ["stable"] if number == 1 else []
        opened.publish("tiny", manifest, blobs, request_id=str(number), aliases=aliases)
    opened.close()
    return url


@pytest.fixture
def processes(tmp_path: Path, registry: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.setenv("NEAP_REGISTRY", registry)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(test_rollout_cycle, "ask", ask)
    with ExitStack() as stack:
        yield stack


def test_a_trial_ends_by_itself(processes, tmp_path):
    model = ["--model", f"tiny={tmp_path / 'model'}"]

    def start(name: str, module: str, *flags: str, listen: str = "127.0.0.1:0") -> ServiceProcess:
        arguments = [*model, "--data-dir", str(tmp_path / name), *flags]
        process = ServiceProcess(name, module, arguments, tmp_path / f"{name}.log", listen=listen)
        return processes.enter_context(process)

    calibrator = start("calibrator", "calibrator_service", "--judge", "asked")
    judging = calibrator.wait_serving(READY_TIMEOUT_S)
    flags = ("--default-alias", "stable", "--report-to", judging, "--report-interval-s", "0.5")
    worker = start("worker", "inference_service", *flags).wait_serving(READY_TIMEOUT_S)
    client = processes.enter_context(NeapClient(judging))
    with NeapClient(worker) as direct:
        _, expected = ask(direct, "alone", policy="full")

    def stable() -> pb.Alias:
        return next(alias for alias in client.list_aliases("tiny") if alias.name == "stable")

    with Load([worker, worker]) as load:
        wait_until(lambda: client.get_judged("tiny").is_acting, timeout_s=120)
        client.begin_trial(pb.BeginTrialRequest(model_id="tiny", alias="stable", version=2))
        wait_until(lambda: stable().canary.share_per_mille > 50, timeout_s=TRIAL_TIMEOUT_S)
        os.kill(calibrator.pid, signal.SIGKILL)
        calibrator.stop()
        again = start("calibrator", "calibrator_service", "--judge", "asked", listen=judging)
        assert again.wait_serving(READY_TIMEOUT_S) == judging
        wait_until(lambda: not stable().HasField("canary"), timeout_s=TRIAL_TIMEOUT_S)
        history = client.alias_history("tiny", "stable")
    assert history[0].reason.startswith("no_difference: ")
    assert history[0].to_version == 1
    assert {change.actor for change in history[:-1]} == {"judge"}
    assert load.failures == []
    assert load.answers == {expected}
