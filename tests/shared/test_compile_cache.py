"""What compilers of GPU code have made is kept below the data folder, within a limit."""

import json
import os
import subprocess
import sys

import pytest
import structlog

from shared.compile_cache import VARIABLES, keep_compiled


def test_places_are_named_unless_others_are(tmp_path):
    environment = {"TRITON_CACHE_DIR": "mine"}
    keep_compiled(tmp_path / "cache", 100, environment)
    assert environment.keys() == VARIABLES.keys()
    assert environment["TRITON_CACHE_DIR"] == "mine"
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "inductor")


def test_what_older_versions_left_is_removed_beyond_the_limit(tmp_path):
    file = tmp_path / "inductor" / "a" / "kernel"
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(100))
    keep_compiled(tmp_path, 100, {})
    assert file.exists()
    keep_compiled(tmp_path, 99, {})
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path):
    (tmp_path / "file").touch()
    environment: dict[str, str] = {}
    with structlog.testing.capture_logs() as logs:
        keep_compiled(tmp_path / "file" / "cache", 100, environment)
    assert environment == {}
    assert logs[0]["event"] == "compiled code is not kept for the next start"


COMPILES = """
import json, sys
from pathlib import Path
from shared.compile_cache import keep_compiled
keep_compiled(Path(sys.argv[1]), 1 << 30)
from torch._dynamo.utils import counters
from shared.model.paged_runner import PagedRunner
from shared.model.recorder import NoRecorder
from shared.model.runners import LayerCompiler
from tests.paged import load_family
runner = PagedRunner(load_family("llama"), kv_budget_bytes=1 << 20, recorder=NoRecorder(), transform=LayerCompiler())
assert runner.compiles, runner.why_not_compiled
print(json.dumps({name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss")}))
"""


@pytest.mark.full
def test_the_next_process_compiles_no_layer_again(tmp_path):
    """On a CPU, whose kernels are C++ in place of Triton's."""
    command = [sys.executable, "-c", COMPILES, str(tmp_path)]
    # A test that compiled in this process has named torch's own folder in its environment.
    unnamed = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    runs = [subprocess.run(command, capture_output=True, text=True, check=True, env=unnamed).stdout for _ in range(2)]
    first, later = (json.loads(run.splitlines()[-1]) for run in runs)
    assert first["miss"] > 0
    assert later == {"hit": first["miss"], "miss": 0}
