"""What a machine lacks is off, or broken where the settings need it."""

import subprocess

import pytest
import torch

from neap_engine.doctor import machine
from neap_engine.doctor.finding import Check
from shared import ops
from shared.errors import PreconditionFailed

NEEDED = pytest.mark.parametrize(("is_needed", "status"), [(True, "broken"), (False, "off")])


def test_kernels_that_are_not_built(monkeypatch, tmp_path):
    monkeypatch.setattr(ops, "LIBRARY", tmp_path / "missing.so")
    monkeypatch.setattr(ops, "_loaded", False)
    found = Check("CPU kernels", machine.cpu_kernels).finding()
    assert found.status == "broken"
    assert "run `make build-ops` [OPS_NOT_BUILT]" in found.detail
    assert machine.cuda_kernels(False).status == "off"
    assert machine.cuda_kernels(True).status == "broken"


def test_kernels_that_do_not_load(monkeypatch, tmp_path):
    (tmp_path / "broken.so").write_bytes(b"not a library")
    monkeypatch.setattr(ops, "LIBRARY", tmp_path / "broken.so")
    monkeypatch.setattr(ops, "_loaded", False)
    found = Check("CPU kernels", machine.cpu_kernels).finding()
    assert found.status == "broken"
    assert "[OPS_NOT_LOADABLE]" in found.detail


def test_a_kernel_that_computes_nonsense_is_broken(monkeypatch):
    monkeypatch.setattr(machine, "choose_greedy", lambda logits: torch.tensor([0]))
    assert Check("CPU kernels", machine.cpu_kernels).finding().status == "broken"


@pytest.fixture
def without_gpu(monkeypatch, tmp_path):
    """A machine whose GPU cannot be used. Returns the file in which a driver gives its version."""

    def unavailable(device):
        raise PreconditionFailed(f"the device {device} cannot be used")

    monkeypatch.setattr(machine, "check_device", unavailable)
    monkeypatch.setattr(machine, "DRIVER", tmp_path / "version")
    return tmp_path / "version"


@NEEDED
def test_no_gpu(without_gpu, is_needed, status):
    found = machine.gpu(is_needed)
    assert (found.status, found.detail) == (status, "the device cuda cannot be used")


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build",
    ],
)
def test_a_driver_without_a_usable_gpu_is_named(without_gpu, line):
    without_gpu.write_text(f"{line}\nGCC version:  gcc version 12.2.0\n")
    assert "the machine has NVIDIA's driver 550.54.15" in machine.gpu(True).detail


@NEEDED
def test_a_compiler_that_does_not_compile(monkeypatch, tmp_path, is_needed, status):
    """Such as one without Python's headers."""
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: object())
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'probe.c:1:10: fatal error: Python.h: No such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    found = machine.layer_compiler(is_needed)
    assert found.status == status
    assert "fatal error: Python.h: No such file" in found.detail
    assert "python3-dev" in found.advice


@NEEDED
def test_no_compiler(monkeypatch, tmp_path, is_needed, status):
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    found = machine.layer_compiler(is_needed)
    assert (found.status, found.detail) == (status, "there is no C compiler")


def test_no_triton(monkeypatch):
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed" in machine.layer_compiler(True).detail


def test_a_compiler_with_headers(monkeypatch):
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("CC", raising=False)
    headers = "#include <Python.h>\n"
    include = f"-I{machine.sysconfig.get_paths()['include']}"
    tried = subprocess.run(["gcc", "-E", include, "-"], input=headers, text=True, capture_output=True)
    if tried.returncode != 0:
        pytest.skip("this machine has no gcc with Python's headers")
    assert machine.layer_compiler(True).status == "ok"


@pytest.mark.parametrize(
    ("cuda", "driver", "advice"),
    [
        (None, "580.65", "TORCH_INDEX_URL"),
        ("13.0", None, "docker run --gpus all"),
        ("13.0", "550.54", "torch is built for CUDA 13.0, which needs driver 580 or later"),
        ("12.6", "470.82", "needs driver 525"),
        ("13.0", "580.65", None),
        ("12.6", "550.54", None),
    ],
)
def test_a_driver_and_a_torch_that_do_not_fit_each_other(without_gpu, monkeypatch, cuda, driver, advice):
    monkeypatch.setattr(machine.torch.version, "cuda", cuda)
    if driver:
        without_gpu.write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Tue Mar  5\n")
    given = machine.gpu(True).advice
    assert advice in given if advice else not given
