import io
import struct

import pytest
from neap_client.inference.v1 import inference_pb2 as pb
from rich.console import Console

from demo import charts
from demo.figures import PolicyFigures, policy_table
from neap_engine.cli.evaluate_view import DOTS_PER_INCH


def figures() -> list[PolicyFigures]:
    full = PolicyFigures("full", 20, 2.0, 600, 0, 0, {"a": (1, 2)})
    exact = PolicyFigures("exact", 20, 1.0, 300, 12, 9, {"a": (1, 2)})
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
    entry.add("a", [1, 2, 3, 4, 5], finished)
    entry.add("b", [1, 2, 3, 4, 5], finished)
    # The first token of each generation comes from the prefill.
    assert entry.tokens_per_s == pytest.approx(8.0)
    assert entry.layers_per_token == 12.0
    assert (entry.num_drafted, entry.num_accepted) == (6, 4)


@pytest.mark.parametrize("num_stories", [1, 3])
def test_stories_are_drawn_side_by_side(tmp_path, num_stories):
    stories = {f"story {number}": figures() for number in range(num_stories)}
    path = charts.write_stories(tmp_path / "demo.png", title="tiny", stories=stories)
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG\r\n")
    expected = tuple(round(side * DOTS_PER_INCH) for side in charts.SIZE_INCHES)
    assert struct.unpack(">II", header[16:]) == expected
    assert path.stat().st_size > 10_000
