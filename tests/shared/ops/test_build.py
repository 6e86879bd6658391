"""Which architectures the kernels are built for, and that none is silently left out."""

import stat
from pathlib import Path

import pytest
import torch

from shared.errors import InvalidInput, PreconditionFailed
from shared.ops import build


def test_without_a_gpu_every_architecture_is_built_and_ptx_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flags = build.architecture_flags(build.wanted_architectures())
    names = [flag.split(",code=")[1] for flag in flags]
    numbers = (75, 80, 86, 89, 90, 100, 120)
    assert names == [*(f"sm_{number}" for number in numbers), "compute_120"]


def test_with_a_gpu_only_its_own_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    assert build.wanted_architectures() == "9.0"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0a+PTX")
    assert build.architecture_flags(build.wanted_architectures()) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90a,code=compute_90a",
    ]
    with pytest.raises(InvalidInput, match="'Hopper'"):
        build.architecture_flags("8.0;Hopper")


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)


def test_no_compiler_for_gpus_means_the_cpu_alone_and_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(build.SWITCH, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert build.find_toolkit() is None
    assert build.described() == "for the CPU only: there is no nvcc"
    assert not any(item.rule == "nvcc" for item in build.objects(None))
    monkeypatch.setenv(build.SWITCH, "0")
    assert build.described() == "for the CPU only: it is switched off"


def test_half_a_toolkit_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(build.SWITCH, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin" / "nvcc", f"echo '#$ TOP={tmp_path}' >&2")
    with pytest.raises(PreconditionFailed, match=r"no libcudart_static\.a"):
        build.find_toolkit()
    script(tmp_path / "bin" / "nvcc", "exit 3")
    with pytest.raises(PreconditionFailed, match="does not run"):
        build.find_toolkit()


needs_nvcc = pytest.mark.skipif(build.find_toolkit() is None, reason="there is no nvcc")


@needs_nvcc
def test_a_spilled_register_ends_the_build(tmp_path: Path) -> None:
    """A kernel with more live sums than a thread has registers."""
    (tmp_path / "spill.cu").write_text(
        "__global__ void __launch_bounds__(1024) f(const float* x, float* y) {\n"
        "  float sums[200];\n#pragma unroll\n  for (int i = 0; i < 200; ++i) sums[i] = x[i];\n"
        "  for (int n = 0; n < 99; ++n) {\n#pragma unroll\n"
        "    for (int i = 0; i < 200; ++i) sums[i] = sums[i] * sums[(i + 7) % 200] + x[n];\n  }\n"
        "#pragma unroll\n  for (int i = 0; i < 200; ++i) y[i] = sums[i];\n}\n"
    )
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        flags = build.architecture_flags("8.0")[0]
        patch.setattr(build, "SOURCES", tmp_path)
        patch.setattr(build, "objects", lambda *_: [build.Object("s", "spill.cu", flags, "nvcc")])
        with pytest.raises(PreconditionFailed, match="spilled"):
            build.build(tmp_path / "lib" / "out.so", tmp_path / "objects")


@needs_nvcc
def test_the_library_carries_the_kernels_and_still_loads_without_a_gpu() -> None:
    library = build.build()
    content = library.read_bytes()
    for name in ("route_kernel", "draft_block_kernel", "choose_kernel"):
        assert name.encode() in content
    assert torch._C._dispatch_has_kernel_for_dispatch_key("neap::route", "CUDA")
