"""A matrix' memory gives way to the pages of the file that has it, and nobody who reads it notices."""

import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared import ops
from shared.model.remembered import packed
from shared.model.remembered.packed import MappedFile, PackedMatrices

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux moves a mapping onto another")

WEIGHTS = {f"{n}": torch.randn(64 * (n + 1), 96, generator=torch.Generator().manual_seed(n)) for n in range(3)}


def _make(weights: dict[str, Tensor] = WEIGHTS) -> tuple[PackedMatrices, dict[str, Tensor]]:
    matrices = PackedMatrices()
    bfloats = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    made = {name: matrices.get(name, lambda w=weight: ops.pack_linear(w)) for name, weight in bfloats.items()}
    return matrices, made


def _is_of_file(matrix: Tensor, path: Path) -> bool:
    """Whether the matrix' memory is pages of the file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = line.split()[0].partition("-")
        if int(begin, 16) <= matrix.data_ptr() < int(end, 16):
            return str(path) in line
    return False


def test_pages_of_the_file_take_the_place_of_memory_and_keep_what_was_changed_in_the_header(tmp_path: Path) -> None:
    matrices, made = _make()
    for matrix in made.values():
        ops.round_inputs_(matrix)  # as serving does; the file has the matrices before that
    before = {name: (matrix.data_ptr(), matrix.clone()) for name, matrix in made.items()}
    path = tmp_path / "packed"
    with path.open("x+b") as file:
        table = matrices.write(file)
        file.flush()
        matrices.map(file.fileno(), table)
    assert all(_is_of_file(matrix, path) for matrix in made.values())
    assert {name: matrix.data_ptr() for name, matrix in made.items()} == {name: at for name, (at, _) in before.items()}
    path.unlink()
    assert all(torch.equal(matrix, before[name][1]) for name, matrix in made.items())


def test_what_the_file_has_does_not_follow_memory(tmp_path: Path) -> None:
    matrices, made = _make()
    path = tmp_path / "packed"
    with path.open("x+b") as file:
        table = matrices.write(file)
        file.flush()
        matrices.map(file.fileno(), table)
    data = path.read_bytes()
    for matrix in made.values():
        ops.round_inputs_(matrix)
    assert path.read_bytes() == data
    assert MappedFile(path, table).checked().result()


def test_products_have_the_same_bits_while_the_memory_is_replaced(tmp_path: Path) -> None:
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(9))
    matrices, made = _make()
    for matrix in made.values():
        ops.round_inputs_(matrix)
    expected = {name: ops.packed_linear(x, matrix, len(WEIGHTS[name])) for name, matrix in made.items()}
    wrong, ended = [], threading.Event()

    def multiply() -> None:
        while not ended.is_set():
            wrong.extend(
                name
                for name, m in made.items()
                if not torch.equal(ops.packed_linear(x, m, len(WEIGHTS[name])), expected[name])
            )

    thread = threading.Thread(target=multiply)
    thread.start()
    for number in range(50):
        with (tmp_path / f"{number}").open("x+b") as file:
            table = matrices.write(file)
            file.flush()
            matrices.map(file.fileno(), table)
    ended.set()
    thread.join()
    assert wrong == []


def test_the_largest_are_replaced_where_there_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "MOST_REPLACED", 1)
    matrices, made = _make()
    path = tmp_path / "packed"
    with path.open("x+b") as file:
        table = matrices.write(file)
        file.flush()
        matrices.map(file.fileno(), table)
    assert [_is_of_file(made[name], path) for name in ("0", "1", "2")] == [False, False, True]


def test_memory_that_is_not_in_pages_of_its_own_stays(tmp_path: Path) -> None:
    matrices = PackedMatrices()
    memory = torch.arange(3 * 4096, dtype=torch.int64).to(torch.uint8)
    offset = -memory.data_ptr() % 4096 + 64
    beside = memory[offset : offset + 5000]
    matrices.get("beside", lambda: beside)
    before = memory.clone()
    with (tmp_path / "packed").open("x+b") as file:
        table = matrices.write(file)
        file.flush()
        matrices.map(file.fileno(), table)
    assert torch.equal(memory, before)
    assert not _is_of_file(beside, tmp_path / "packed")
