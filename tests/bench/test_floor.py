"""The bytes of the floor are those of the packed matrices, and every path is timed."""

from pathlib import Path

import pytest

from bench.floor import FLOOR, available, measure
from bench.forms import Form
from shared import ops
from tests.families import build_family
from tests.worker import build_tokenizer


@pytest.mark.parametrize(("title", "number_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_the_floor_has_the_bytes_of_the_format(tmp_path: Path, title: str, number_bytes: int) -> None:
    model = build_family("llama")
    model.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    paths = available(["avx512", "avx2", "portable"])
    serving = ops.cpu_isa()
    num_bytes, medians = measure(Form(title, str(tmp_path)), paths, [1, 2], 3, 1)
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48
    padded_head = 32 * 112  # 97 rows in panels of 16
    headers = 64 * (7 * 6 + 1)
    assert num_bytes == headers + number_bytes * (6 * layer + padded_head)
    assert set(medians) == {(FLOOR, 0)} | {(path, count) for path in paths for count in (1, 2)}
    assert ops.cpu_isa() == serving
