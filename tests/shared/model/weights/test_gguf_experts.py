"""Experts of .gguf files stay in the file's format, wherever their rows belong."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter

from shared.errors import Corrupt
from shared.model.load import _build, load_model
from shared.model.source import arguments_of
from shared.model.weights.composed import Stacked
from shared.model.weights.gguf import GgufReaders
from shared.model.weights.lazy import realise
from shared.model.weights.on_device import TakenBlocks
from shared.model.weights.reading import CheckpointFiles, replaced
from tests.reasons import raises
from tests.shared.model.weights.test_gguf_families import CASES, write


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_gate_is_read_beside_an_up_that_no_kernel_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Both are halves of one parameter."""
    monkeypatch.setattr("shared.model.weights.gguf.BLOCK_KINDS", frozenset({"Q8_0"}))
    architecture, config, add_more = CASES[name]
    model: Any = write(tmp_path / "tiny.gguf", architecture, config, add_more, (Kind.Q8_0, Kind.Q4_0, Kind.F32))
    ids = torch.randint(300, (1, 24), generator=torch.Generator().manual_seed(1))
    loaded = load_model(tmp_path / "tiny.gguf", accelerate=False)
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen3moe", "ffn_up_exps.weight"),
        *(("gpt-oss", f"ffn_{part}_exps.{kind}") for part in ("gate", "up") for kind in ("weight", "bias")),
    ],
)
@pytest.mark.parametrize("change", ["none", "one row", "one expert"])
def test_gate_and_up_that_do_not_fit_each_other_are_a_corrupt_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, tensor: str, change: str
) -> None:
    """Transformers would have zeros in place of one that is not there, and the same row, or expert, again and again."""
    add = GGUFWriter.add_tensor

    def other(writer: GGUFWriter, own: str, numbers: np.ndarray, **options: Any) -> None:
        if own == f"blk.1.{tensor}":
            numbers = np.ascontiguousarray(numbers[:, :1] if change == "one row" else numbers[:1])
        if own != f"blk.1.{tensor}" or change != "none":
            add(writer, own, numbers, **options)

    monkeypatch.setattr(GGUFWriter, "add_tensor", other)
    write(tmp_path / "tiny.gguf", *CASES[name])
    with raises(Corrupt, "MODEL_FILE_CORRUPT", match="of the same shape"):
        load_model(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_file_has_one_fingerprint_whatever_dtype_is_asked_for(tmp_path: Path, dtype: torch.dtype) -> None:
    write(tmp_path / "tiny.gguf", *CASES["gpt-oss"])
    assert load_model(tmp_path / "tiny.gguf", dtype=dtype).fingerprint == load_model(tmp_path / "tiny.gguf").fingerprint


@pytest.mark.parametrize("kinds", [(Kind.MXFP4,) * 3, (Kind.Q8_0, Kind.Q5_0, Kind.MXFP4)])
def test_gate_and_up_of_gpt_oss_stay_in_the_format_of_the_file(kinds: tuple[Kind, Kind, Kind], tmp_path: Path) -> None:
    architecture, _, add_more = CASES["gpt-oss"]
    config = copy.deepcopy(CASES["gpt-oss"][1])
    config.intermediate_size = 64

    def more(writer: GGUFWriter) -> None:
        add_more(writer)
        writer.add_expert_feed_forward_length(64)

    model: Any = write(tmp_path / "tiny.gguf", architecture, config, more, kinds)
    loaded = load_model(tmp_path / "tiny.gguf", compute_dtype=torch.float32)
    ids = torch.randint(300, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, rtol=1e-3, atol=1e-3)
    assert loaded.acceleration is not None
    assert loaded.acceleration.experts == 2
    assert loaded.acceleration.formats["MXFP4"] == (4 if kinds[0] == kinds[1] else 2)
    assert loaded.acceleration.formats["float32"] == 12
    with CheckpointFiles(None) as checkpoint, replaced(GgufReaders(checkpoint).replacements):
        held: Any = _build(arguments_of(tmp_path / "tiny.gguf"), torch.float32)
        taken = TakenBlocks(held)
        realise(held)
        taken.round_others(torch.float32)
        taken.place(torch.device("cpu"))
    kept = {name for name, _ in held.named_buffers() if name.endswith("_low")}
    assert len(kept) == (4 if kinds[0] == kinds[1] else 2)
    with torch.inference_mode():
        torch.testing.assert_close(held(ids).logits, model(ids).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("accelerate", [False, True])
def test_experts_stay_in_the_format_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accelerate: bool
) -> None:
    if accelerate:  # then no layer's experts are ever dequantised together, also not to compare

        def refuse(_: Stacked) -> None:
            raise AssertionError("all experts of a layer are dequantised")

        monkeypatch.setattr(Stacked, "dequantised", refuse)
    architecture, config, add_more = CASES["qwen3moe"]
    model: Any = write(tmp_path / "tiny.gguf", architecture, config, add_more, (Kind.Q8_0,) * 3)
    loaded = load_model(tmp_path / "tiny.gguf", accelerate=accelerate, compute_dtype=torch.float32)
    ids = torch.randint(300, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, rtol=1e-3, atol=1e-3)
    if accelerate:
        report, rounded = loaded.acceleration, load_model(tmp_path / "tiny.gguf").acceleration
        assert report is not None
        assert rounded is not None
        assert (report.layers, rounded.layers) == (2, 2)
        assert report.formats["Q8_0"] == 4  # gate and up of a layer's experts count as one
        assert not report.dequantised
