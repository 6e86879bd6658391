"""The names of the library, which are loaded when one of them is used."""

import logging
import os
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

import neap_engine
from neap_engine import face
from neap_engine.face import log_to_logging


def test_a_star_import_and_help_have_every_name():
    names: dict[str, object] = {}
    exec("from neap_engine import *", names)
    assert names.keys() - {"__builtins__"} == set(face.__all__) <= set(dir(neap_engine))
    page = pydoc.plain(pydoc.render_doc(neap_engine))
    assert not [name for name in face.__all__ if name not in page]


def test_a_name_that_there_is_not():
    assert not hasattr(neap_engine, "generate")


def test_lines_go_to_logging_and_not_to_standard_output(caplog, capsys):
    log_to_logging()
    with caplog.at_level(logging.INFO, logger="neap"):
        structlog.get_logger("neap.model").info("model loaded", model_id="tiny")
    assert caplog.record_tuples == [("neap.model", logging.INFO, "event='model loaded' model_id='tiny'")]  # fmt: skip
    structlog.get_logger("neap.model").debug("a detail")
    assert capsys.readouterr().out == ""


def test_a_line_about_an_error_has_the_error(caplog):
    log_to_logging()
    try:
        raise OSError("the disk is on fire: 100 %")
    except OSError:
        structlog.get_logger("neap.model").warning("cannot load model", exc_info=True)
    assert caplog.messages == ["event='cannot load model'"]
    assert "OSError: the disk is on fire: 100 %" in caplog.text


def test_an_application_that_has_configured_structlog_keeps_its_own(capsys):
    structlog.configure(processors=[structlog.processors.JSONRenderer()])
    log_to_logging()
    structlog.get_logger("neap.model").info("model loaded")
    assert capsys.readouterr().out == '{"event": "model loaded"}\n'


@pytest.fixture
def sixteen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with 16 CPUs on 8 cores and a quota of 2 CPUs.
    The numbers of threads that are set, after that of torch."""
    chosen = [16]
    for cpu in range(16):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    monkeypatch.setattr(face, "CPUS", tmp_path)
    monkeypatch.setattr(face, "usable_cpus", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr("torch.get_num_threads", lambda: chosen[-1])
    monkeypatch.setattr("torch.set_num_threads", chosen.append)
    return chosen


@pytest.mark.parametrize(("number", "lowered"), [(16, [2]), (8, [2]), (1, []), (2, []), (3, []), (12, [])])
def test_what_torch_has_chosen_is_lowered_to_the_quota_and_what_was_set_stays(sixteen, number, lowered):
    sixteen[:] = [number]
    face.fit_torch_threads({})
    assert sixteen == [number, *lowered]


@pytest.mark.parametrize("variable", face.CHOSEN_BY)
def test_a_variable_is_a_choice(sixteen, variable):
    face.fit_torch_threads({variable: "16"})
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


@pytest.mark.full
def test_the_import_loads_nothing_and_a_name_all_of_it_with_threads_that_fit(tmp_path):
    """Also if torch is there already."""
    (tmp_path / "process").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    variables = (*face.CHOSEN_BY, "NEAP_THREADS")
    environment = {k: v for k, v in os.environ.items() if k not in variables}
    program = PROGRAM.format(folder=str(tmp_path))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "False True 1\n", done.stderr
