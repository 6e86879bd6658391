"""A version that drafts is put on trial behind one that does not, in real processes: it grows and is promoted by what
the worker measures, although the calibrator is killed on the way."""

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
from tests.e2e.test_rollout_cycle import READY_TIMEOUT_S, Load, ask
from tests.waiting import wait_until
from tests.worker import save_model

pytestmark = [pytest.mark.e2e, pytest.mark.full]
TRIAL_TIMEOUT_S = 600.0


@pytest.fixture
def registry(tmp_path: Path) -> str:
    """With version 1, whose look-up is never believed, behind "stable", and version 2, whose look-up always is."""
    loaded = load_model(save_model(tmp_path / "model"), model_id="tiny")
    url = str(tmp_path / "registry")
    opened = open_registry(url)
    for number, bias in ((1, -8.0), (2, 4.0)):
        ladder = Ladder(
            model=ModelIdentity.of(loaded), lookup_confidence=TableConfidence(bias, [[0.0] * size for size in SIZES])
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
    with ExitStack() as stack:
        yield stack


def test_a_trial_ends_in_a_promotion_by_itself(processes, tmp_path):
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
        wait_until(lambda: client.list_judged("tiny").is_acting, timeout_s=120)
        client.begin_trial(pb.BeginTrialRequest(model_id="tiny", alias="stable", version=2))
        wait_until(lambda: stable().canary.share_per_mille > 50, timeout_s=TRIAL_TIMEOUT_S)
        os.kill(calibrator.pid, signal.SIGKILL)
        calibrator.stop()
        again = start("calibrator", "calibrator_service", "--judge", "asked", listen=judging)
        assert again.wait_serving(READY_TIMEOUT_S) == judging
        wait_until(lambda: stable().version == 2, timeout_s=TRIAL_TIMEOUT_S)
        history = client.alias_history("tiny", "stable")
    assert history[0].reason.startswith("promote: ")
    assert {change.actor for change in history[:-1]} == {"judge"}
    assert load.failures == []
    assert load.answers == {expected}
