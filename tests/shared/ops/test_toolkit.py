"""What of NVIDIA's is installed, what fits what, and nvcc from PyPI, on planted drivers, compilers and indexes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shared.errors import PreconditionFailed
from shared.ops import build, toolkit
from tests.reasons import raises

Plant = Callable[[str], None]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plant:
    """A machine without driver, nvcc or switch, and a torch for CUDA. Returns what installs a driver."""
    monkeypatch.setattr(toolkit, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(toolkit, "NVCC_PLACES", ())
    monkeypatch.setattr(toolkit, "FETCH_DIR", tmp_path / "fetched")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in (toolkit.SWITCH, "CUDA_HOME", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    line = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Mar  5 22:23:56 UTC 2024\n"
    return lambda version: (tmp_path / "version").write_text(line.format(version)) and None


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def plant_nvcc(home: Path, cuda: str = "13.0", *, runtime: bool = True) -> None:
    script(home / "bin" / "nvcc", f"echo 'tools, release {cuda}, V{cuda}.88'; echo '#$ TOP={home}' >&2")
    if runtime:
        (home / "lib").mkdir()
        (home / "lib" / "libcudart_static.a").touch()


def plant_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_there: bool = True) -> Path:
    """A pip whose index has nvcc, or not. Returns the file in which it writes what it was asked for."""
    plant_nvcc(tmp_path / "package")
    arguments = tmp_path / "arguments"
    home = tmp_path / "fetched" / "nvidia" / "cu13"
    copy = (
        f"mkdir -p {home} && cp -r {tmp_path}/package/. {home}" if is_there else "echo 'no route to host' >&2; exit 1"
    )
    script(tmp_path / "python", f'echo "$@" >> {arguments}\n{copy}')
    monkeypatch.setattr(toolkit.sys, "executable", str(tmp_path / "python"))
    return arguments


def test_a_build_beside_a_driver_fetches_nvcc_once(monkeypatch, tmp_path, driver, capsys) -> None:
    driver("580.65.06")
    asked = plant_index(monkeypatch, tmp_path)
    assert build.described().endswith("with nvcc 13.0 from PyPI")
    for _ in range(2):
        found = toolkit.wanted_toolkit()
        assert found is not None
        assert found.nvcc == str(tmp_path / "fetched" / "nvidia" / "cu13" / "bin" / "nvcc")
    assert len(asked.read_text().splitlines()) == 1
    assert "cuda-toolkit[cudart,nvcc]==13.0.*" in asked.read_text()
    assert "from PyPI" in capsys.readouterr().err
    assert "from PyPI" not in build.described()


@pytest.mark.parametrize(
    ("has_driver", "cuda", "switch", "why"),
    [
        (False, "13.0", None, "no driver of NVIDIA"),
        (True, None, None, "torch is built for the CPU"),
        (True, "13.0", "0", "switched off"),
    ],
)
def test_nothing_is_fetched_where_nothing_could_run_it(monkeypatch, tmp_path, driver, has_driver, cuda, switch, why):
    asked = plant_index(monkeypatch, tmp_path)
    if has_driver:
        driver("580.65")
    if switch:
        monkeypatch.setenv(toolkit.SWITCH, switch)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert toolkit.wanted_toolkit() is None
    assert not asked.exists()
    assert build.described().startswith("for the CPU only:")
    assert why in build.described()


def test_the_switch_demands_kernels_on_any_machine(monkeypatch, tmp_path, driver) -> None:
    """As for a wheel, or for a machine whose torch comes later."""
    plant_index(monkeypatch, tmp_path)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv(toolkit.SWITCH, "1")
    assert toolkit.wanted_toolkit() is not None


@pytest.mark.parametrize(
    ("version", "home", "is_there", "why", "asks"),
    [
        ("550.54", None, True, "CUDA 13.0 needs NVIDIA's driver 580 or later, and this machine has 550.54", False),
        ("580.65", None, False, "no route to host", True),
        ("580.65", "elsewhere", True, "elsewhere, which has no bin/nvcc", False),
    ],
)
def test_a_gpu_without_nvcc_ends_the_build(monkeypatch, tmp_path, driver, version, home, is_there, why, asks) -> None:
    """A library for the CPU alone would be refused when a worker starts, and nobody would know why."""
    driver(version)
    asked = plant_index(monkeypatch, tmp_path, is_there=is_there)
    if home:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / home))
    with raises(PreconditionFailed, "NO_NVCC", match=why) as refused:
        toolkit.wanted_toolkit()
    assert "NEAP_BUILD_CUDA=0" in refused.value.message
    assert asked.exists() == asks


def test_half_a_toolkit_is_an_error(monkeypatch, tmp_path, driver) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    plant_nvcc(tmp_path, runtime=False)
    with raises(PreconditionFailed, "NO_CUDART", match=r"no libcudart_static\.a"):
        toolkit.find_toolkit()
    script(tmp_path / "bin" / "nvcc", "exit 3")
    with raises(PreconditionFailed, "NVCC_BROKEN", match="does not run"):
        toolkit.find_toolkit()


@pytest.mark.parametrize(
    ("cuda", "version", "fits"),
    [
        ("13.0", "580.65.06", True),
        ("13.2", "580.65.06", True),
        ("13.0", "575.51", False),
        ("12.6", "525.60", True),
        ("12.8", "470.82", False),
    ],
)
def test_minor_versions_of_cuda_need_the_driver_of_their_major_version(driver, cuda, version, fits) -> None:
    assert not toolkit.driver_problem(cuda)
    driver(version)
    assert bool(toolkit.driver_problem(cuda)) != fits


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        ("8.0", (8, 9), True),
        ("8.6", (8, 0), False),
        ("8.0;9.0", (7, 5), False),
        ("9.0", (10, 0), False),
        ("9.0+PTX", (10, 0), True),
        ("9.0a+PTX", (10, 0), False),
        ("9.0a", (9, 0), True),
        (build.ARCHITECTURES, (12, 1), True),
        (build.ARCHITECTURES, (7, 0), False),
    ],
)
def test_code_runs_within_a_major_version_and_ptx_beyond(architectures, capability, runs) -> None:
    assert toolkit.code_runs_on(architectures.split(";"), capability) == runs
