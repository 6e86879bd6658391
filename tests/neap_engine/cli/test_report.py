import io
import json
import struct

import pytest
from neap_client.inference.v1 import inference_pb2 as pb
from rich.console import Console

from neap_engine.cli import charts
from neap_engine.cli.measure import PolicyFigures, policy_table


def figures() -> list[PolicyFigures]:
    full = PolicyFigures("full", 20, 2.0, 600, 0, 0, {("full", 30): 20}, {"a": (1, 2)})
    exact = PolicyFigures("exact", 20, 1.0, 300, 12, 9, {("full", 30): 11, ("suffix", 0): 9}, {"a": (1, 2)})
    return [full, exact]


def rendered(entries: list[PolicyFigures]) -> str:
    stream = io.StringIO()
    Console(file=stream, width=120).print(policy_table(entries))
    return stream.getvalue()


def test_table_compares_with_the_baseline():
    line = next(line for line in rendered(figures()).splitlines() if "exact" in line)
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells == ["exact", "19.0 (2.00x)", "15.0", "9/12", "yes"]


def test_table_shows_that_an_output_differs():
    entries = figures()
    entries[1].outputs["a"] = (1, 3)
    line = next(line for line in rendered(entries).splitlines() if "exact" in line)
    assert line.strip("│").split("│")[-1].strip() == "no"


def test_figures_add_up():
    entry = PolicyFigures("exact")
    finished = pb.Finished(
        usage=pb.Usage(num_completion_tokens=5),
        depth=pb.DepthStatistics(num_drafted=3, num_accepted=2, num_layer_executions=60),
    )
    finished.timing.decode.FromMilliseconds(500)
    finished.depth.exits.add(rung="suffix", depth=0, num_tokens=2)
    entry.add("a", [1, 2, 3, 4, 5], finished)
    entry.add("b", [1, 2, 3, 4, 5], finished)
    # The first token of each generation comes from the prefill.
    assert entry.tokens_per_s == pytest.approx(8.0)
    assert entry.layers_per_token == 12.0
    assert (entry.num_drafted, entry.num_accepted) == (6, 4)
    assert entry.exits == {("suffix", 0): 4}


def test_png_has_the_documented_size(tmp_path):
    bins = [
        {"probability": 0.1, "agreement": 0.2, "count": 5},
        {"probability": 0.9, "agreement": 0.8, "count": 9},
        {"probability": 0.0, "agreement": 0.0, "count": 0},
    ]
    manifest = {"rungs": [{"name": "suffix", "figures": {"reliability": bins}}, {"name": "depth-4"}]}
    path = charts.write_report(
        tmp_path / "new" / "report.png",
        title="tiny",
        num_layers=30,
        figures=figures(),
        manifest_json=json.dumps(manifest),
    )
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG\r\n")
    expected = tuple(round(side * charts.DOTS_PER_INCH) for side in charts.SIZE_INCHES)
    assert struct.unpack(">II", header[16:]) == expected
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize("num_stories", [1, 3])
def test_stories_are_drawn_side_by_side(tmp_path, num_stories):
    stories = {f"story {number}": figures() for number in range(num_stories)}
    path = charts.write_stories(tmp_path / "demo.png", title="tiny", stories=stories)
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize("is_chat", [True, False])
def test_report_command_writes_the_png(service, neap, tmp_path, is_chat):
    service.inference.has_chat_template = is_chat
    target = tmp_path / "r.png"
    flags = ["--worker", service.address, "--calibrator", service.address, "--output", str(target)]
    result = neap("report", "--model", "tiny", *flags)
    assert result.exit_code == 0, result.output
    assert target.is_file()
    assert "4/4" in result.stdout
    assert "yes" in result.stdout
    assert "learned from 637,994 tokens" in result.stdout
    exact = [r for r in service.inference.requests if r.depth.WhichOneof("policy") == "exact"]
    assert all(request.router.version == 2 for request in exact)
    assert {request.WhichOneof("prompt") for request in exact} == {"chat" if is_chat else "text"}
    assert ("continued as plain text" in result.stdout) is not is_chat


def test_reliability_is_read_from_the_rungs_figures():
    bins = [{"probability": 0.25, "agreement": 0.5, "count": 4}]
    rungs = [{"name": "suffix", "figures": {"reliability": bins}}, {"name": "depth-4"}]
    assert charts.reliability({"rungs": rungs}) == {"suffix": [(0.25, 0.5, 4)]}
