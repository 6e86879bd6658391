import os
import subprocess
import sys
from pathlib import Path

import pytest

from neap_engine import threads


@pytest.fixture
def sixteen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with 16 CPUs on 8 cores and a quota of 2 CPUs.
    The numbers of threads that are set, after that of torch."""
    chosen = [16]
    for cpu in range(16):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    monkeypatch.setattr(threads, "CPUS", tmp_path)
    monkeypatch.setattr(threads, "usable_cpus", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr("torch.get_num_threads", lambda: chosen[-1])
    monkeypatch.setattr("torch.set_num_threads", chosen.append)
    return chosen


@pytest.mark.parametrize(("number", "lowered"), [(16, [2]), (8, [2]), (1, []), (2, []), (3, []), (12, [])])
def test_what_torch_has_chosen_is_lowered_to_the_quota_and_what_was_set_stays(sixteen, number, lowered):
    sixteen[:] = [number]
    threads.fit_torch_threads({})
    assert sixteen == [number, *lowered]


@pytest.mark.parametrize("variable", threads.CHOSEN_BY)
def test_a_variable_is_a_choice(sixteen, variable):
    threads.fit_torch_threads({variable: "16"})
    assert sixteen == [16]


PROGRAM = """
import sys
from pathlib import Path
import neap_engine
before = "torch" in sys.modules
from shared import cgroups
cgroups.ROOT = Path({folder!r})
cgroups.PROCESS_CGROUPS = cgroups.ROOT / "process"
import torch
torch.get_num_threads()
neap_engine.NeapError
print(before, "neap_engine.face" in sys.modules, torch.get_num_threads())
"""


def test_the_import_loads_nothing_and_a_name_all_of_it_with_threads_that_fit(tmp_path):
    """Also if torch is there already."""
    (tmp_path / "process").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    variables = (*threads.CHOSEN_BY, "NEAP_THREADS")
    environment = {k: v for k, v in os.environ.items() if k not in variables}
    program = PROGRAM.format(folder=str(tmp_path))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "False True 1\n", done.stderr
