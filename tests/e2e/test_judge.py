"""Versions on trial in real processes, by what the worker measures: a faster one is promoted, although the calibrator
is killed on the way, and a slower one is rolled back.

What is planted are the requests: a client knows which version will answer, and allows the slower one a draft a pass. At
equal requests a worker's own corrections make versions of these tables alike within seconds.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from neap_client import NeapClient
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.router.v1 import router_pb2

from calibrator_service.judge.trial import SHARES
from inference_service.resolutions import takes_canary
from neap_engine.cli.processes import ServiceProcess
from shared.ladder.artefact import pack_ladder
from shared.model.load import load_model
from shared.registry.base import Canary
from shared.registry.factory import open_registry
from tests.e2e.test_rollout_cycle import READY_TIMEOUT_S, Load
from tests.generation import FULL, request_of
from tests.waiting import wait_until
from tests.worker import build_ladder, save_model

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1500)]
TRIAL_TIMEOUT_S = 600.0
# The model repeats one token here, so look-up is nearly always right.
PROMPT, MAX_TOKENS, INITIALIZER_RANGE = "hello hello hello", 48, 0.1


@dataclass
class Planted:
    """What clients ask: every second request is one that the version on trial answers whatever its share is, the others
    are not. One of both kinds may draft one token a pass."""

    on_trial: int
    is_slower: bool = False

    def ask(self, client: NeapClient, request_id: str) -> tuple[int, tuple[int, ...]]:
        is_on_trial = int(request_id[-1]) % 2 == 0

        def belongs(name: str) -> bool:
            share = SHARES[0] if is_on_trial else SHARES[-1]
            return takes_canary(name, "tiny", "stable", Canary(self.on_trial, share)) == is_on_trial

        name = next(filter(belongs, (f"{request_id}-{number}" for number in count())))
        exact = pb.Exact(max_drafts=1 if is_on_trial == self.is_slower else 0)
        return answer(client, name, pb.DepthPolicy(exact=exact))


def answer(client: NeapClient, request_id: str, depth: pb.DepthPolicy) -> tuple[int, tuple[int, ...]]:
    request = request_of(MAX_TOKENS, text=PROMPT, depth=depth)
    stream = client.generate(request, request_id=request_id, timeout_s=60)
    started = next(stream).started
    list(stream)
    return started.router_version, tuple(stream.token_ids)


@pytest.fixture
def registry(tmp_path: Path) -> str:
    """With three versions of one look-up, of which "stable" names the first."""
    folder = save_model(tmp_path / "model", initializer_range=INITIALIZER_RANGE)
    loaded = load_model(folder, model_id="tiny")
    url = str(tmp_path / "registry")
    opened = open_registry(url)
    for number in (1, 2, 3):
        manifest, blobs = pack_ladder(build_ladder(loaded), {"number": number})
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


def test_trials_end_by_themselves(processes, tmp_path):
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
        _, expected = answer(direct, "alone", FULL)

    def stable() -> router_pb2.Alias:
        return next(alias for alias in client.list_aliases("tiny") if alias.name == "stable")

    def acts() -> list[str]:
        """What the judge did, the latest first."""
        return [change.reason.partition(":")[0] for change in client.alias_history("tiny", "stable")]

    planted = Planted(on_trial=2)
    with Load([worker, worker], planted.ask) as load:
        wait_until(lambda: client.get_judged("tiny").is_acting, timeout_s=120)
        client.begin_trial(router_pb2.BeginTrialRequest(model_id="tiny", alias="stable", version=2))
        wait_until(lambda: "grow" in acts(), timeout_s=TRIAL_TIMEOUT_S)
        os.kill(calibrator.pid, signal.SIGKILL)
        calibrator.stop()
        again = start("calibrator", "calibrator_service", "--judge", "asked", listen=judging)
        assert again.wait_serving(READY_TIMEOUT_S) == judging
        wait_until(lambda: not stable().HasField("canary"), timeout_s=TRIAL_TIMEOUT_S)
        promoted = client.alias_history("tiny", "stable")[0]

        planted.on_trial, planted.is_slower = 3, True
        client.begin_trial(router_pb2.BeginTrialRequest(model_id="tiny", alias="stable", version=3))
        assert stable().canary.version == 3
        wait_until(lambda: not stable().HasField("canary"), timeout_s=TRIAL_TIMEOUT_S)
        history = client.alias_history("tiny", "stable")
    assert promoted.reason.startswith("promote: ")
    assert (promoted.from_version, promoted.to_version) == (1, 2)
    assert history[0].reason.startswith("roll_back: ")
    assert history[0].to_version == 2
    assert {change.actor for change in history[:-1]} == {"judge"}
    assert load.failures == []
    assert load.answers == {expected}
