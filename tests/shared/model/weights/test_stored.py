from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize

from shared import ops
from shared.model.weights.files import StableFile
from shared.model.weights.stored import Blocks, Plain, Stored

ROWS, COLUMNS, OFFSET = 40, 64, 7


@pytest.fixture(
    params=[torch.float32, torch.bfloat16, torch.float16, Kind.Q8_0, Kind.Q4_1], ids=str
)
def form(request: pytest.FixtureRequest) -> torch.dtype | Kind:
    form: torch.dtype | Kind = request.param
    return form


@pytest.mark.parametrize("wanted", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ordered", [False, True])
def test_a_look_up_reads_its_rows_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: torch.dtype | Kind,
    wanted: torch.dtype | None,
    ordered: bool,
) -> None:
    ops.load()
    numbers = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    order = torch.arange(ROWS).flip(0) if ordered else None
    path = tmp_path / "weights"
    stored: Stored
    if isinstance(form, Kind):
        data = quantize(numbers.numpy(), form).tobytes()
        path.write_bytes(bytes(OFFSET) + data)
        file = StableFile(path)
        stored = Blocks(file, OFFSET, (ROWS, COLUMNS), form, wanted=wanted, row_order=order)
    else:
        data = bytes(numbers.to(form).view(torch.uint8).numpy().tobytes())
        path.write_bytes(bytes(OFFSET) + data)
        file = StableFile(path)
        stored = Plain(file, OFFSET, (ROWS, COLUMNS), form, wanted=wanted, row_order=order)
    whole = stored.dequantised_rows()
    read: list[int] = []
    original = StableFile.read

    def count(self: StableFile, offset: int, size: int) -> torch.Tensor:
        read.append(size)
        return original(self, offset, size)

    monkeypatch.setattr(StableFile, "read", count)
    ids = torch.tensor([[3, 0], [39, 3]])
    assert torch.equal(stored.look_up(ids), whole[ids])
    assert sum(read) == 4 * len(data) // ROWS
    assert stored.look_up(ids[:0]).shape == (0, 2, COLUMNS)
    file.close()
