import ctypes
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.library import opcheck

from shared import ops
from shared.errors import PreconditionFailed
from shared.ops import build
from shared.ops.experts import expert_table
from shared.ops.layer import TensorTable

OPS = [
    "pack_linear",
    "packed_linear",
    "choose_packed",
    "packed_gated_linear",
    "rms_norm",
    "layer_norm",
    "activate",
    "rotary",
    "contiguous_attention",
    "ragged_contiguous_attention",
    "decoder_layers",
    "choose_experts",
    "experts",
    "draft_top",
    "route",
    "draft_chains",
    "choose_greedy",
    "choose_sampled",
    "paged_attention",
]


# A table has the addresses of its tensors.
_KEPT: list[TensorTable] = []


def table(tensors: list[torch.Tensor]) -> torch.Tensor:
    _KEPT.append(TensorTable(tensors))
    return _KEPT[-1].table


def _calls() -> dict[str, tuple]:
    packed = ops.pack_linear(torch.randn(20, 12))
    up = ops.pack_linear(torch.randn(20, 12))
    q, (k, v) = torch.randn(1, 4, 3, 8), torch.randn(2, 1, 2, 6, 8).unbind()
    cos, sin = torch.randn(2, 1, 3, 8).unbind()
    mask = torch.ones(1, 1, 3, 6, dtype=torch.bool)
    return {
        "pack_linear": (torch.randn(20, 12),),
        "packed_linear": (torch.randn(2, 3, 12), packed, 20, torch.randn(20)),
        "choose_packed": (torch.randn(3, 12), packed, 20),
        "packed_gated_linear": (torch.randn(2, 12), packed, up, 20, "silu", torch.randn(40)),
        "rms_norm": (torch.randn(2, 12), torch.randn(12), 1e-5, 1.0),
        "layer_norm": (torch.randn(2, 12), torch.randn(12), torch.randn(12), 1e-5),
        "activate": (torch.randn(2, 12), "gelu"),
        "rotary": (q, k[:, :, :3], cos, sin),
        "contiguous_attention": (q, k, v, 6, mask, True, 0.3, 4.0, torch.randn(4)),
        "ragged_contiguous_attention": (
            q,
            k[:, :, :3],
            v[:, :, :3],
            [torch.zeros(1, 2, 7, 8) for _ in range(2)],
            [torch.zeros(1, 2, 7, 8) for _ in range(2)],
            [5, 0],
            [2, 1],
            [torch.ones(1, 1, 2, 7, dtype=torch.bool), torch.empty(0, dtype=torch.bool)],
            *(0.3, 4.0, torch.randn(4)),
        ),
        "decoder_layers": (
            torch.randn(1, 3, 12),
            *([cos], [sin]),
            table([torch.randn(12), torch.randn(12), torch.randn(8), torch.randn(8), torch.empty(0), torch.randn(12)]),
            table(
                [
                    *(ops.pack_linear(torch.randn(rows, 12)) for rows in (32, 16, 16)),
                    ops.pack_linear(torch.randn(12, 32)),
                    *(packed, up),
                    ops.pack_linear(torch.randn(12, 20)),
                ]
            ),
            table(
                [torch.randn(32), *(torch.empty(0) for _ in range(3)), torch.randn(40), torch.randn(12), torch.randn(4)]
            ),
            [table([torch.zeros(1, 2, 7, 8)]) for _ in range(2)],
            [table([torch.zeros(1, 2, 7, 8)]) for _ in range(2)],
            *([5, 0], [2, 1]),
            [torch.ones(1, 1, 2, 7, dtype=torch.bool), torch.empty(0, dtype=torch.bool)],
            *([0], [], 1, 4, [20], "silu", 1e-5, 0.0, 0.3, None),
        ),
        "choose_experts": (torch.randn(3, 12), packed, *(20, 2, True), torch.randn(20)),
        "experts": (
            torch.randn(3, 12),
            *(torch.tensor([[1, 0], [0, 2], [1, 1]]), torch.rand(3, 2)),
            expert_table([packed, up, ops.pack_linear(torch.randn(12, 20))] * 2),
            "silu",
        ),
        "draft_top": (torch.randn(3, 8), torch.randn(70, 8).bfloat16(), torch.randn(70), 2),
        "route": (
            torch.randn(3, 8),
            torch.randn(5, 8).half(),
            torch.randn(5),
            torch.randn(5),
            torch.randn(3, 5),
            torch.randn(3),
            torch.randn(3, 2),
            torch.randn(3) + 4,
            torch.arange(3),
            *(0.1, 1e-6, 0.0, 1.0),
            torch.zeros(1, dtype=torch.int32),
        ),
        "draft_chains": (
            torch.randn(1, 3, 8),
            torch.randn(1, 8),
            *([4, 2, 1], [2, 1], [0, 1], [3, 2], [1.0, 0.5], [1.0, 1.0], [0.1, 0.0]),
            *(torch.randn(9, 8), torch.arange(4)),
            [
                ops.pack_linear(torch.randn(*size))
                for size in ((8, 32), (8, 16), (12, 8), (12, 8), (8, 12), (4, 8), (5, 8))
            ],
            [torch.randn(size) for size in (8, 8, 0, 5, 5, 15, 3)],
            *(0.1, 1e-6, 0.001, 0.999, 3),
        ),
        "choose_greedy": (torch.randn(3, 9),),
        "choose_sampled": (torch.rand(3, 9), torch.rand(3, dtype=torch.float64)),
        "paged_attention": (
            torch.randn(4, 3, 8).transpose(0, 1),
            torch.randn(3, 2, 8),
            torch.randn(3, 2, 5),
            torch.zeros(6, 2, 4, 8),
            torch.zeros(6, 2, 4, 5),
            torch.tensor([[5, 0], [2, 3]]),
            torch.tensor([1, 0, 0]),
            torch.tensor([5, 0, -1]),
            *(0.3, 4.0, 3, torch.randn(4)),
        ),
    }


@pytest.mark.parametrize("name", OPS)
def test_schema_fake_and_dispatch_are_sound(name: str) -> None:
    opcheck(getattr(torch.ops.neap, name).default, _calls()[name])


@pytest.mark.parametrize("name", OPS)
def test_compiles_as_one_graph(name: str) -> None:
    function, arguments = getattr(torch.ops.neap, name).default, _calls()[name]

    def doubled(*args):
        out = function(*args)
        first = args[0] if out is None else out[0] if isinstance(out, tuple) else out
        return first * 2

    torch.compiler.reset()  # each op is a version of the same function: there is a limit to these
    compiled = torch.compile(doubled, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*arguments), doubled(*arguments))


def test_compiles_for_any_number_of_tokens() -> None:
    packed = ops.pack_linear(torch.randn(20, 12))
    compiled = torch.compile(
        lambda x: ops.packed_linear(x, packed, 20) + 1, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for rows in (2, 5, 9):
        x = torch.randn(rows, 12)
        assert torch.equal(compiled(x), ops.packed_linear(x, packed, 20) + 1)


# What each object of the library is compiled with, as Linux names it.
AVX512BF16 = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "avx512_vnni"}
NEEDS = {
    "amx": {*AVX512BF16, "amx_tile", "amx_int8"},
    "avx512bf16": AVX512BF16,
    "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw"},
    "avx2": {"avx2", "fma", "f16c"},
    "portable": set(),
    "i8mm": {"dotprod", "i8mm", "bf16"},
    "dotprod": {"dotprod"},
    "neon": set(),
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads the features of an x86 processor")
def test_the_instruction_set_follows_from_the_processors_features() -> None:
    features = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
    request_feature = 158, 0x1023, 18  # Linux lets a process use the matrix unit's registers only if it asks
    if ctypes.CDLL(None).syscall(*request_feature) != 0:
        features.discard("amx_tile")
    ops.set_cpu_isa("auto")
    assert ops.cpu_isa() == next(isa for isa, needed in NEEDS.items() if needed <= features)


@pytest.mark.parametrize("name", build.ISA_FLAGS)
def test_an_object_is_compiled_with_what_the_dispatch_asks_for(name: str) -> None:
    flags = build.ISA_FLAGS[name].replace("-march=armv8.2-a+", "-m").replace("+", " -m").split()
    names = {"avx512bf16": "avx512_bf16", "avx512vnni": "avx512_vnni"}
    named = {names.get(flag[2:], flag[2:]) for flag in flags if flag[:2] == "-m" and "=" not in flag}
    assert named == NEEDS[name]


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(RuntimeError, match="has no 'mmx'"):
        ops.set_cpu_isa("mmx")


def test_a_missing_library_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ops, "_loaded", False)
    monkeypatch.setattr(ops, "LIBRARY", tmp_path / "none.so")
    assert not ops.is_available()
    with pytest.raises(PreconditionFailed, match="make build-ops"):
        ops.pack_linear(torch.randn(2, 2))


def test_a_broken_library_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(ops, "_loaded", False)
    monkeypatch.setattr(ops, "LIBRARY", broken)
    with pytest.raises(PreconditionFailed, match="do not load"):
        ops.load()


def test_importing_the_package_loads_nothing() -> None:
    code = "import shared.ops, torch; assert not hasattr(torch.ops.neap, 'rms_norm'); print('lazy')"
    root = Path(__file__).resolve().parents[3]
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert result.stdout == "lazy\n"


def test_a_second_build_compiles_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    build.build(verbose=True)
    assert "no work to do" in capsys.readouterr().out


def test_a_failed_build_shows_what_the_compiler_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "broken.cpp").write_text("int main() { return undeclared_name; }\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc")
    monkeypatch.setattr(build, "objects", lambda *_: [build.Object("broken", "broken.cpp", "")])
    with pytest.raises(PreconditionFailed, match="undeclared_name"):
        build.build(tmp_path / "lib" / "out.so", tmp_path / "objects")
    assert not (tmp_path / "lib" / "out.so").exists()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="widens the kernels by x86 flags")
@pytest.mark.full
@pytest.mark.timeout(1500)
def test_the_paths_of_wider_instruction_sets_hold(tmp_path: Path) -> None:
    """The tiles and panel groups of AVX-512, on 16 lanes that the compiler builds from narrower ones. To compile them
    takes minutes. A processor with AVX-512 runs them as they are, by the same tests."""
    with suppress(RuntimeError):
        ops.set_cpu_isa("avx512")
        ops.set_cpu_isa("auto")
        pytest.skip("this processor has AVX-512")
    wide = f"{build.COMMON_FLAGS} {build.KERNEL_FLAGS} -mavx2 -mfma -DNEAP_PORTABLE_LANES=16 -O0"
    kernels, wider = tmp_path / "kernels.o", tmp_path / "wide.so"
    compiler = build.find_compiler()
    source = str(build.SOURCES / "cpu" / "kernels.cpp")
    subprocess.run([compiler, *wide.split(), "-c", source, "-o", str(kernels)], check=True)
    names = [item.name for item in build.objects() if item.name != "kernels_portable"]
    others = [str(build.BUILD_DIR / f"{name}.o") for name in names]
    subprocess.run([compiler, "-shared", "-o", str(wider), str(kernels), *others], check=True)
    code = (
        "import sys, pathlib, pytest; from shared import ops;"
        f"ops.LIBRARY = pathlib.Path({str(wider)!r});"
        "sys.exit(pytest.main(['-q', '-k', 'portable and (neighbours or shorter_view)',"
        " 'tests/shared/ops/test_linear.py', 'tests/shared/ops/test_attention.py']))"
    )
    root = Path(__file__).resolve().parents[3]
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root)
    assert result.returncode == 0, result.stdout + result.stderr
