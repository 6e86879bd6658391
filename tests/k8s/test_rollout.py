"""A rolling update and a scale-down of the rendered manifests, with real workers and clients: no stream is lost, none
is cut."""

import json
import os
import subprocess
import sys

import pytest

from tests.cluster import IN_NAMESPACE, ROOT, in_namespace
from tests.worker import save_model

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.alone, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("overlay", "components"), [("cpu", ""), ("gpu", "")], ids=["surge", "no spare place"])
def test_a_rollout_and_a_scale_down_lose_no_stream(overlay, components, tmp_path):
    save_model(tmp_path / "model")
    before = in_namespace()
    path = os.pathsep.join([str(ROOT), str(ROOT / "protos"), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | ({IN_NAMESPACE: "1"} if before else {})
    done = subprocess.run(
        [*before, sys.executable, "-m", "tests.cluster", overlay, components, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["lost"] == []
    assert seen["cut"] == []
    assert seen["exit_statuses"] == [0, 0, 0]
    assert seen["num_during"] > 0
