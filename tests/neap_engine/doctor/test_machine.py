"""What a machine lacks is off, or broken where the settings need it."""

import subprocess
from types import SimpleNamespace

import pytest
import torch

from neap_engine.doctor import machine
from neap_engine.doctor.finding import Check
from shared import ops
from shared.errors import PreconditionFailed
from shared.model.load import check_device
from shared.ops import cards, fakes, toolkit
from shared.ops.cards import CudaBuild

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


def test_kernels_of_an_older_neap(monkeypatch):
    """What torch says of an op that a library does not have is no crash."""
    namespace = torch.library.Library("neap_of_tests", "FRAGMENT")
    monkeypatch.setattr(fakes, "register", lambda: namespace._register_fake("new_op", torch.empty))
    monkeypatch.setattr(ops, "_loaded", False)
    found = Check("CPU kernels", machine.cpu_kernels).finding()
    assert "run `make build-ops`" in found.detail
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
    monkeypatch.setattr(toolkit, "DRIVER", tmp_path / "version")
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
        ("13.0", "550.54", "CUDA 13.0 needs NVIDIA's driver 580 or later, and this machine has 550.54"),
        ("12.6", "470.82", "driver 525 or later"),
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


@pytest.fixture
def with_gpus(monkeypatch, tmp_path):
    """A machine with two GPUs, a T4 and an RTX 5090, driver 580, torch and kernels for CUDA 13.0. Returns what replaces
    the kernels."""
    properties = [
        SimpleNamespace(name="Tesla T4", major=7, minor=5, total_memory=15 << 30),
        SimpleNamespace(name="RTX 5090", major=12, minor=0, total_memory=32 << 30),
    ]

    def of(device):
        return properties[device if isinstance(device, int) else torch.device(device).index or 0]

    monkeypatch.setattr(machine, "check_device", lambda device: None)
    monkeypatch.setattr(machine, "_run_a_kernel", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(properties))
    monkeypatch.setattr(torch.cuda, "get_device_properties", of)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (of(device).major, of(device).minor))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(toolkit, "DRIVER", tmp_path / "version")
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Tue\n")

    def plant(built):
        for module in (cards, machine):
            monkeypatch.setattr(module, "cuda_build", lambda: built)

    plant(CudaBuild("13.0", ("7.5", "12.0+PTX")))
    return plant


@pytest.mark.parametrize(("device", "name", "advice"), [("cuda", "Tesla T4", "float16"), ("cuda:1", "RTX 5090", "")])
def test_the_gpu_of_the_settings_is_examined(with_gpus, device, name, advice):
    found = machine.gpu(True, device)
    assert (found.status, found.facts["name"], found.facts["driver"]) == ("ok", name, "580.65.06")
    assert advice in found.advice
    assert bool(advice) == bool(found.advice)
    assert machine.cuda_kernels(True, device).detail.endswith("they run on this GPU")


@NEEDED
def test_a_gpu_beyond_the_last_one(with_gpus, monkeypatch, is_needed, status):
    monkeypatch.setattr(machine, "check_device", check_device)
    for found in (machine.gpu(is_needed, "cuda:2"), machine.cuda_kernels(is_needed, "cuda:2")):
        assert found.status == status
        assert "the last GPU that this process sees is cuda:1. Set --device" in found.detail


@pytest.mark.parametrize(
    ("built", "why", "mends"),
    [
        (None, "the library is built for CPUs only", "fetches nvcc from PyPI"),
        (CudaBuild("12.6", ("8.0", "9.0")), "capability 12.0", "TORCH_CUDA_ARCH_LIST=12.0 make build-ops"),
        (CudaBuild("14.0", ("12.0",)), None, None),
    ],
)
@NEEDED
def test_kernels_that_do_not_fit_the_gpu(with_gpus, built, why, mends, is_needed, status):
    with_gpus(built)
    found = machine.cuda_kernels(is_needed, "cuda:1")
    assert found.status == (status if why else "ok")
    said = found.detail + found.advice
    assert not why or (why in said and mends in said)


def test_a_kernel_that_the_gpu_does_not_run_is_broken(with_gpus, monkeypatch):
    def fails(device):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")

    monkeypatch.setattr(machine, "_run_a_kernel", fails)
    found = machine.cuda_kernels(True, "cuda:1")
    assert found.status == "broken"
    assert "no kernel image" in found.detail
    assert "make build-ops" in found.advice


@pytest.mark.parametrize(
    ("cuda", "driver", "of_torch", "status", "says"),
    [
        ("13.0", "580.65", "13.0", "ok", "/nvcc, CUDA 13.0"),
        ("12.8", "580.65", "13.0", "ok", "torch is built for CUDA 13.0, which does no harm"),
        ("13.0", "550.54", "12.6", "off", "set CUDA_HOME to a CUDA toolkit that the driver runs"),
        (None, "580.65", "13.0", "off", "with nvcc 13.0 from PyPI"),
        (None, "550.54", "12.6", "off", "needs NVIDIA's driver 580"),
        (None, "580.65", None, "off", "torch is built for the CPU"),
    ],
)
def test_what_the_next_build_will_use(with_gpus, monkeypatch, tmp_path, cuda, driver, of_torch, status, says):
    (tmp_path / "version").write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Tue\n")
    monkeypatch.setattr(torch.version, "cuda", of_torch)
    monkeypatch.delenv(toolkit.SWITCH, raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(toolkit, "NVCC_PLACES", ())
    if cuda:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        (tmp_path / "bin").mkdir()
        nvcc = tmp_path / "bin" / "nvcc"
        nvcc.write_text(f"#!/bin/sh\necho 'release {cuda}, V{cuda}.1'; echo '#$ TOP={tmp_path}' >&2\n")
        nvcc.chmod(0o755)
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib" / "libcudart_static.a").touch()
    found = machine.compiler()
    assert found.status == status
    assert says in found.detail + found.advice
