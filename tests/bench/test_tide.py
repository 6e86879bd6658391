"""`bench.tide` accepts only TIDE's unpacked source package, and its expected scores are those of TIDE's router."""

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bench.tide import SOURCES, TideTimes, build, expected_scores, sources
from shared.errors import NotFound, PreconditionFailed


def unpacked(folder: Path, *, name: str = "tide-inference") -> Path:
    """Writes files with the package's names whose sources do not compile."""
    (folder / "PKG-INFO").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 0.2.1\n")
    for source in SOURCES:
        path = folder / "csrc" / source
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#error nothing\n")
    return folder


def test_a_folder_that_is_not_the_package_is_refused(tmp_path):
    with pytest.raises(NotFound, match="not the unpacked source package"):
        sources(tmp_path)
    with pytest.raises(NotFound, match="not the unpacked source package"):
        sources(unpacked(tmp_path, name="another"))


def test_the_error_names_a_missing_file(tmp_path):
    folder = unpacked(tmp_path)
    assert [path.name for path in sources(folder)] == [Path(name).name for name in SOURCES]
    (folder / "csrc/kernels/exit_scatter.cu").unlink()
    with pytest.raises(NotFound, match=r"exit_scatter\.cu"):
        sources(folder)


def test_sources_that_do_not_compile_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setenv("PATH", os.environ["PATH"])  # changed by `build`
    with pytest.raises(PreconditionFailed, match="cannot be built"):
        build(unpacked(tmp_path))


def test_expected_scores_are_those_of_norm_and_two_layers():
    torch.manual_seed(0)
    states, gain = torch.randn(5, 64), torch.rand(64)
    down, up = torch.randn(64, 8), torch.randn(8, 1)
    inner = F.silu(F.rms_norm(states, (64,), gain, 1e-6) @ down)
    scores = expected_scores(states, gain, down, up)
    torch.testing.assert_close(scores.float(), torch.sigmoid(inner @ up)[:, 0])


def test_a_row_shows_how_the_time_was_measured():
    assert TideTimes(31.25, False, 21.04, 0.0).printed() == "31.2 (loop) | 21.0"
    assert TideTimes(31.25, True, float("nan"), 0.0).printed() == "31.2 | not seen"
