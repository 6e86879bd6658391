"""The program for a borrowed GPU, without one: that nothing keeps later stages from running, and what comes first."""

import sys
from argparse import Namespace
from collections import Counter

import pytest
import torch

from bench.card import PREDICTED, STAGES, Stage, ceilings, run_stage, show
from bench.roofline import exit_times_us

# What one call on a borrowed machine may take.
CALL_S = 600


def test_each_part_fits_a_call():
    assert [*{stage.part for stage in STAGES.values()}] == [1, 2, 3]
    seconds: Counter[int] = Counter()
    for stage in STAGES.values():
        seconds[stage.part] += stage.limit_s
    assert max(seconds.values()) <= CALL_S
    assert [stage.part for stage in STAGES.values()] == sorted(stage.part for stage in STAGES.values())
    assert PREDICTED.keys() <= STAGES.keys()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("print('rows'); print('{\"a\": 1.5}')", {"figures": {"a": 1.5}}),
        ("print('{\"a\": 1.5}'); raise SystemExit(1)", {"failed": "status 1"}),
        ("print('rows')", {"failed": "Expecting value"}),
        ("pass", {"failed": "index"}),
        ("import time; time.sleep(60)", {"failed": "longer than 0.5 s"}),
    ],
)
def test_a_stage_says_what_it_found_or_why_not(code, found, capsys):
    record = run_stage("short", [sys.executable, "-c", code], 0.5 if "sleep" in code else 30)
    for name, value in found.items():
        assert value in record[name] if isinstance(value, str) else record[name] == value
    show(record, {"a": 2.0, "never measured": 1.0})
    assert ("| a | 2 | 1.5 |" in capsys.readouterr().out) == ("figures" in found)


def test_figures_have_the_names_of_their_predictions():
    stage: Stage = STAGES["ceilings"]
    assert stage.run is ceilings
    assert PREDICTED["ceilings"].keys() == ceilings(Namespace(device="cpu")).keys()
    timed = exit_times_us(torch.device("cpu"), (1, 8), rounds=2, width=576)
    predicted = {name for name in PREDICTED["kernels"] if name.endswith((", 1", ", 8"))}
    assert predicted <= timed.keys()
