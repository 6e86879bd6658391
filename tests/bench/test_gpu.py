"""The benchmark of a GPU, on a CPU: its rows, and the rate of full depth alone, which it compares with the floor."""

import pytest

from bench.gpu import compare, weight_bytes
from bench.imposed import SHAPES, impose
from shared.model.loaded import wrap_model
from tests.families import build_family


@pytest.mark.full
def test_a_row_for_each_number_of_requests(capsys: pytest.CaptureFixture[str]) -> None:
    found = compare(impose(SHAPES["tiny"], (2, 4), 0.8), [1, 2], 1)
    assert set(found) == {1, 2}
    assert all(own["full"] > 0 and not own["differ"] for own in found.values())
    lines = capsys.readouterr().out.splitlines()  # the log's too
    first, second = (line.strip("| ").split(" | ") for line in lines if line.startswith("|"))
    assert (first[:2], second[:2]) == (["2+4", "1"], ["2+4", "2"])
    assert first[-1] == second[-1] == "yes"


def test_the_bytes_of_a_pass_are_those_of_the_packed_matrices() -> None:
    model = wrap_model(build_family("llama"), accelerate=True).model
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48
    padded_head = 32 * 112  # 97 rows in panels of 16
    headers = 64 * (7 * 6 + 1)
    assert weight_bytes(model) == headers + 4 * (6 * layer + padded_head)
