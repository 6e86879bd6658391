import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from shared.ops import build

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A tree with the files that packaging needs and nothing generated.
    The files of csrc are empty, so they compile quickly."""
    ignored = shutil.ignore_patterns("*_pb2*", "__pycache__", "_lib")
    for name in ("protos", "neap_engine", "calibrator_service", "inference_service", "shared"):
        shutil.copytree(ROOT / name, tmp_path / "neap" / name, ignore=ignored)
    for name in ("pyproject.toml", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path / "neap" / name)
    (tmp_path / "neap" / "README.md").touch()
    for item in build.objects():
        source = tmp_path / "neap" / "csrc" / item.source
        source.parent.mkdir(parents=True, exist_ok=True)
        source.touch()
    return tmp_path / "neap"


def build_wheel(checkout: Path) -> "subprocess.CompletedProcess[str]":
    """Build the wheel for the CPU into `checkout`/dist."""
    return subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NEAP_BUILD_CUDA": "0"},
    )


def test_the_wheel_contains_the_library(checkout: Path, tmp_path: Path):
    result = build_wheel(checkout)
    assert result.returncode == 0, result.stderr
    assert "for the CPU only: it is switched off" in result.stderr
    (wheel,) = (checkout / "dist").glob("neap_server-*-py3-none-*.whl")
    assert "any" not in wheel.name
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # The client has a distribution of its own.
    assert {path.name for path in site.glob("neap*/") if path.suffix != ".dist-info"} == {"neap_engine"}
    assert (site / "shared/py.typed").is_file()
    assert (site / "neap_engine/__init__.py").is_file()
    assert not (site / "shared" / "build_hook.py").exists()
    assert (site / "shared" / "ops" / "_lib" / "libneap_ops.so").is_file()


def test_a_compile_error_ends_the_installation(checkout: Path):
    (checkout / "csrc" / "binding.cpp").write_text("#error not like this\n")
    result = build_wheel(checkout)
    assert result.returncode != 0
    assert "not like this" in result.stderr + result.stdout
    assert not (checkout / "dist").exists() or not any((checkout / "dist").iterdir())
