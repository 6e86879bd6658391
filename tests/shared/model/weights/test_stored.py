import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize

from shared import ops
from shared.model import fingerprint
from shared.model.fingerprint import _tensor_digest
from shared.model.weights import files
from shared.model.weights import stored as module
from shared.model.weights.files import StableFile, keep_memory
from shared.model.weights.lazy import LazyWeight, as_parameter, parts_side_by_side
from shared.model.weights.stored import Blocks, Plain, Stored

ROWS, COLUMNS, OFFSET = 40, 64, 7


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16, Kind.Q8_0, Kind.Q4_1], ids=str)
def form(request: pytest.FixtureRequest) -> torch.dtype | Kind:
    form: torch.dtype | Kind = request.param
    return form


def _stored(
    path: Path, form: torch.dtype | Kind, *, wanted: torch.dtype | None = None, ordered: bool
) -> tuple[Stored, StableFile]:
    """A matrix [ROWS, COLUMNS] in the file `path`, which is opened."""
    ops.load()
    numbers = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    order = torch.arange(ROWS).flip(0) if ordered else None
    shape = (ROWS, COLUMNS)
    if isinstance(form, Kind):
        path.write_bytes(bytes(OFFSET) + quantize(numbers.numpy(), form).tobytes())
        file = StableFile(path)
        return Blocks(file, OFFSET, shape, form, target_dtype=wanted, row_order=order), file
    path.write_bytes(bytes(OFFSET) + numbers.to(form).view(torch.uint8).numpy().tobytes())
    file = StableFile(path)
    return Plain(file, OFFSET, shape, form, target_dtype=wanted, row_order=order), file


@pytest.mark.parametrize("wanted", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ordered", [False, True])
def test_a_look_up_reads_its_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: torch.dtype | Kind, wanted: torch.dtype | None, ordered: bool
) -> None:
    stored, file = _stored(tmp_path / "weights", form, wanted=wanted, ordered=ordered)
    whole = stored.dequantised_rows()
    read: list[int] = []
    original = StableFile.read

    def count(self: StableFile, offset: int, size: int) -> torch.Tensor:
        read.append(size)
        return original(self, offset, size)

    monkeypatch.setattr(StableFile, "read", count)
    ids = torch.tensor([[3, 0], [39, 3]])
    assert torch.equal(stored.look_up(ids), whole[ids])
    assert sum(read) == 4 * (file.size - OFFSET) // ROWS
    assert stored.look_up(ids[:0]).shape == (0, 2, COLUMNS)
    file.close()


@pytest.mark.parametrize("ordered", [False, True])
def test_a_product_and_a_digest_do_without_the_whole_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: torch.dtype | Kind, ordered: bool
) -> None:
    stored, file = _stored(tmp_path / "weights", form, ordered=ordered)
    weight, held = stored.dequantised(), LazyWeight(stored)
    monkeypatch.setattr(module, "PART_NUMBERS", 16 * COLUMNS)
    for name in ("dequantised", "dequantised_rows"):
        monkeypatch.setattr(type(stored), name, None)
    x = torch.randn(2, 3, COLUMNS)
    assert F.linear(x[:0], held).shape == (0, 3, ROWS)
    for bias in (None, torch.randn(ROWS)):
        for inference in (False, True):  # which takes a product apart in another way
            with torch.inference_mode(inference):
                out = F.linear(x, held, bias)
            torch.testing.assert_close(out, F.linear(x, weight, bias))
        with parts_side_by_side():
            torch.testing.assert_close(F.linear(x, held, bias), F.linear(x, weight, bias))
    assert _tensor_digest(held) == _tensor_digest(weight)
    if isinstance(stored, Blocks) or not ordered:
        assert [len(part) for part in stored.row_parts()] == [16, 16, 8]
    file.close()


def test_parts_are_dequantised_by_other_threads_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, file = _stored(tmp_path / "weights", Kind.Q8_0, ordered=False)
    monkeypatch.setattr(module, "PART_NUMBERS", 16 * COLUMNS)
    meet, rows_of, names = threading.Barrier(2, timeout=60), ops.packed_rows, []

    def wait(packed: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        names.append(threading.current_thread().name)
        if len(rows) == 16:  # two of three parts
            meet.wait()
        return rows_of(packed, rows)

    monkeypatch.setattr(ops, "packed_rows", wait)

    def multiply() -> None:
        with parts_side_by_side():
            assert torch.get_num_threads() == 1
            F.linear(torch.randn(3, COLUMNS), LazyWeight(stored))
            raise KeyError

    count = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyError):
            multiply()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(count)
    assert [name.startswith("neap-parts") for name in names] == [True] * 3
    file.close()


@pytest.mark.parametrize("ordered", [False, True])
def test_what_is_packed_from_memory_that_is_used_again_stays(tmp_path: Path, ordered: bool) -> None:
    kinds = (Kind.Q8_0, Kind.Q4_1, Kind.Q8_0)
    matrices = [_stored(tmp_path / str(i), kind, ordered=ordered)[0] for i, kind in enumerate(kinds)]
    with ThreadPoolExecutor(1, initializer=keep_memory) as pool:
        packed = [*pool.map(lambda matrix: matrix.pack(), matrices)]
    alone = [_stored(tmp_path / str(i), kind, ordered=ordered)[0].pack() for i, kind in enumerate(kinds)]
    assert all(map(torch.equal, packed, alone))


def test_memory_for_much_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, file = _stored(tmp_path / "weights", Kind.Q8_0, ordered=False)
    assert isinstance(stored, Blocks)
    made: list[int] = []

    def counted(count: int) -> torch.Tensor:
        made.append(count)
        return torch.empty(count, dtype=torch.uint8)

    monkeypatch.setattr(files, "_new", counted)
    size = file.size - OFFSET
    for most, num_made in ((size, 1), (size - 1, 3)):
        monkeypatch.setattr(files, "_MOST_KEPT_BYTES", most)
        with ThreadPoolExecutor(1, initializer=keep_memory) as pool:
            made.clear()
            for _ in range(3):
                pool.submit(stored._pack_blocks).result()
        assert made.count(size) == num_made
    file.close()


def test_the_largest_matrices_are_packed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, file = _stored(tmp_path / "weights", Kind.Q8_0, ordered=False)
    order: list[int] = []
    monkeypatch.setattr(Blocks, "pack_ahead", lambda stored: order.append(stored.rows))
    monkeypatch.setattr(fingerprint, "TRIM_NUMBERS", 10 * COLUMNS)
    monkeypatch.setattr(fingerprint, "usable_cpus", lambda: 1)
    model = torch.nn.Module()
    for number, rows in enumerate((3, 12, 4, 10)):
        stored = Blocks(file, OFFSET, (rows, COLUMNS), Kind.Q8_0)
        model.register_parameter(str(number), as_parameter(LazyWeight(stored)))
    fingerprint.pack_ahead(model)  # type: ignore[arg-type]
    assert order == [12, 10, 3, 4]
    file.close()
