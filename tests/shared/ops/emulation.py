"""Compiles the GPU kernels for the emulator, and calls them: see emulator.h and emulated.cpp."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shared.ops.build import find_compiler

ROOT = Path(__file__).resolve().parents[3]
HARNESS = Path("tests/shared/ops")
CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
FLAGS = "-std=c++20 -O0 -g0 -DNEAP_EMULATED -fno-sanitize-recover=all"


class EmulationError(Exception):
    """The emulator or a sanitizer ended the run. The text is its message."""


@dataclass(frozen=True)
class Bug:
    """A bug to plant: `right`, which occurs once in the source, becomes `wrong`."""

    name: str
    file: str
    right: str
    wrong: str


@dataclass(frozen=True)
class Call:
    """A launch: `numbers` and `buffers` in the order in which emulated.cpp reads them. Buffers are changed in place."""

    name: str
    numbers: Sequence[float]
    buffers: Sequence[torch.Tensor | None]
    seed: int = 0

    def encoded(self) -> bytes:
        text = f"{self.name} {self.seed} {len(self.numbers)} {len(self.buffers)}\n"
        parts = [text.encode(), (" ".join(repr(float(n)) for n in self.numbers) + "\n").encode()]
        for buffer in self.buffers:
            content = b"" if buffer is None else raw(buffer).numpy().tobytes()
            parts += [f"{-1 if buffer is None else len(content)}\n".encode(), content]
        return b"".join(parts)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes, sharing its memory."""
    assert tensor.is_contiguous()
    return tensor.view(-1).view(torch.uint8)


def blank(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A buffer that no kernel has written yet: NaN, or -1."""
    out = torch.empty(shape, dtype=dtype)
    raw(out).fill_(255)
    return out


def compiled(
    folder: Path,
    bug: Bug | None = None,
    sanitizers: str = "address,undefined",
    harness: str = "emulated",
    flags: str = "",
) -> Path:
    """Compiles the harness with the kernels of csrc, or with a copy of them that has `bug`."""
    root = ROOT
    if bug is not None:
        root = folder / "tree"
        shutil.copytree(ROOT / "csrc", root / "csrc")
        (root / HARNESS).mkdir(parents=True)
        for name in ("emulator.h", "emulated_main.h", f"{harness}.cpp"):
            shutil.copy(ROOT / HARNESS / name, root / HARNESS / name)
        path = root / "csrc" / bug.file
        source = path.read_text()
        assert source.count(bug.right) == 1, f"{bug.name}: not exactly one place in {bug.file}"
        path.write_text(source.replace(bug.right, bug.wrong))
    program = folder / harness
    command = [
        find_compiler(),
        *FLAGS.split(),
        *flags.split(),
        *([f"-fsanitize={sanitizers}"] if sanitizers else []),
        f"-I{root / HARNESS}",
        f"-I{root / 'csrc' / 'include'}",
        str(root / HARNESS / f"{harness}.cpp"),
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True)
    return program


def run(program: Path, calls: Sequence[Call]) -> None:
    """Runs the calls one after another in one process. Raises `EmulationError`."""
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"}
    result = subprocess.run(
        [str(program)],
        input=b"".join(call.encoded() for call in calls),
        capture_output=True,
        check=False,
        env=environment,
        timeout=300,
    )
    if result.returncode != 0:
        raise EmulationError(result.stderr.decode(errors="replace")[-3000:])
    answer = torch.frombuffer(bytearray(result.stdout), dtype=torch.uint8)
    at = 0
    for call in calls:
        for buffer in call.buffers:
            if buffer is not None and buffer.numel():
                size = raw(buffer).numel()
                raw(buffer).copy_(answer[at : at + size])
                at += size
    assert at == len(answer)
