"""The soak of `bench.soak`, short, on a tiny model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.ladder.artefact import pack_ladder
from shared.ladder.folder import write_router_folder
from shared.model.load import load_model
from tests.worker import build_ladder, save_model
from tests.worker_process import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.full]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks into /proc")
def test_a_short_soak_holds(tmp_path):
    model, router = save_model(tmp_path / "model"), tmp_path / "router"
    write_router_folder(router, *pack_ladder(build_ladder(load_model(model)), {}))
    path = os.pathsep.join([str(ROOT), str(ROOT / "protos"), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [
            *(sys.executable, "-m", "bench.soak", "--model", str(model), "--router", str(router)),
            *("--minutes", "0.4", "--pause-s", "0.1", "--stall-s", "1", "--hold-s", "3"),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    for line in ("answer       finished", "slow reader  ended", "bad          rejected"):
        assert line in result.stdout
