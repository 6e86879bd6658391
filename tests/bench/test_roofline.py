"""The table of ops covers all ops that run on a GPU."""

from dataclasses import replace

import pytest
import torch

from bench.roofline import COLUMNS, PARTS, Bench, PlainDraws
from shared.ladder.confidence_head import ConfidenceHead
from shared.ladder.head_rows import Matmul
from shared.ops import runs_on

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def bench() -> Bench:
    assert runs_on("cpu")
    bench = Bench(torch.device("cpu"), rounds=2)
    with torch.inference_mode():
        for part in PARTS:
            part(bench, 576, 1)
    return bench


def test_every_op_for_gpus_is_in_the_table(bench: Bench) -> None:
    if not runs_on("cuda"):
        pytest.skip("the kernels are built for the CPU only: no nvcc")
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    ops = {name.split("::")[1].split(".")[0] for name in registered if name.startswith("neap::")}
    assert "route" in ops
    # Triton's kernels are none of a CPU's, and the ops of slots are timed as parts of a step.
    apart = {"paged_attention", "invariant_linear", "blocks_linear", "expert_linear", "largest_shares"}
    apart |= {"layer_norm", "rms_norm", "slots_begin", "slots_draft", "slots_plan", "slots_accept"}
    assert ops - {line.op for line in bench.lines} == apart


def test_a_row_names_its_cells_in_the_tables_order(bench: Bench) -> None:
    (line,) = [line for line in bench.lines if line.op == "route"]
    assert {"floor", "PyTorch", "neap"} == set(line.times_us)
    # Two rounds of so small an op are too noisy to be compared.
    line = replace(line, times_us={"floor": 4.0, "PyTorch": 30.0, "neap": 5.0})
    # 128 x 576 weights of two bytes each; two operations (a product and a sum) per weight.
    cells = dict(zip(COLUMNS, line.cells(), strict=True))
    assert list(cells.values())[:5] == ["route", 576, 1, "0.15", "0.1"]
    assert (cells["floor"], cells["PyTorch"], cells["half"]) == ("4.0", "30.0", "")
    assert (cells["neap"], cells["PyTorch / neap"], cells["neap / floor"]) == ("5.0", "6.0", "1.2")
    (draws,) = [line for line in bench.lines if line.op == "draft_top"]
    assert str(draws.cells()[-1]).startswith("neap float32 ")


def test_the_float16_contender_agrees_with_the_modules() -> None:
    torch.manual_seed(0)
    rows = torch.randn(300, 64) / 8
    plain = PlainDraws(ConfidenceHead(64), Matmul(rows, None))
    adapted, place = torch.randn(50, 64), 1 + torch.arange(50) % 4
    with torch.inference_mode():
        best, top, _ = plain.draft_top(adapted)  # type: ignore[misc]
        half_best, half_top, _ = plain.halved(rows).draft_top(adapted)  # type: ignore[misc]
        probabilities = plain.route(adapted, place, top.values)  # type: ignore[has-type]
        halved = plain.halved(rows).route(adapted, place, half_top.values)  # type: ignore[has-type]
    assert (best == half_best).float().mean() > 0.95  # type: ignore[has-type]
    assert torch.allclose(halved.float(), probabilities, atol=0.02)
