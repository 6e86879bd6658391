"""What proofs, measurements and packed matrices depend on: the model's content, this build, and this machine.

A model is known by the digest of its files. To read them takes a second per gigabyte, so the digest is itself
remembered, for files with the same place, inode, size and times and the same sampled bytes. The times of a file include
that of the last change of its inode, which no program can set back.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from shared import ops
from shared.cpus import usable_cpus
from shared.model.weights.files import parts_of
from shared.ops import LIBRARY

PACKAGE = Path(__file__).resolve().parents[2]
# Read by what computes: torch's kernels, oneDNN, MKL and OpenMP.
_VARIABLES = ("ATEN_", "DNNL_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "TORCH_")
_DISTRIBUTIONS = ("gguf", "llguidance", "numpy", "safetensors", "tokenizers", "torch", "transformers")
# Lines of /proc/cpuinfo, on x86 and on ARM.
_PROCESSOR = (
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),
)
# Files of a folder that transformers reads.
_SUFFIXES = (".json", ".jinja", ".model", ".safetensors", ".txt")
_PIECE = 1 << 24
# Samples of a file: so many blocks of so many bytes, evenly spread. The first has the header.
_SAMPLES, _SAMPLE = 32, 1 << 14
# A file that was written to so recently may change again without a change of its times.
_SETTLED_NS = 2_000_000_000

State = list[list[Any]]


def files_of(source: str | Path) -> tuple[Path, ...]:
    """The files of a model in a folder, or a .gguf file with all its parts. () if its source is neither."""
    path = Path(source)
    if path.is_dir():
        return tuple(sorted(p for p in path.iterdir() if p.suffix in _SUFFIXES and p.is_file()))
    parts = parts_of(path) if path.suffix == ".gguf" else ()
    return parts if all(part.is_file() for part in parts) else ()


def state_of(files: Iterable[Path]) -> State:
    """Changes if a file is written to, replaced, moved or touched. Raises `OSError`."""
    return [
        [str(path.resolve()), s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns]
        for path, s in ((path, path.stat()) for path in files)
    ]


def is_settled(state: State) -> bool:
    """Whether the next change to a file will change the state, too, however coarse the clock of the file system is."""
    return all(time.time_ns() - max(file[-2:]) > _SETTLED_NS for file in state)


def sample_of(files: Iterable[Path]) -> str:
    """A digest of bytes all over the files. Raises `OSError`."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for index in range(_SAMPLES):
                file.seek(max(size - _SAMPLE, 0) * index // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def content_of(files: Iterable[Path]) -> str:
    """A digest of the names and all bytes of the files. Raises `OSError`."""
    pieces = [(path, start) for path in files for start in range(0, path.stat().st_size or 1, _PIECE)]
    with ThreadPoolExecutor(usable_cpus()) as pool:
        digests = list(pool.map(_piece_digest, pieces))
    named = [[path.name, start, digest] for (path, start), digest in zip(pieces, digests, strict=True)]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def _piece_digest(piece: tuple[Path, int]) -> str:
    path, start = piece
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.sha256(file.read(_PIECE)).hexdigest()


def build_of() -> dict[str, Any]:
    """Identifies this build and this machine, as far as they decide bits, packed forms, or costs."""
    return {
        "code": _code(),
        "versions": {name: importlib.metadata.version(name) for name in _DISTRIBUTIONS},
        "torch": torch.version.git_version,
        "python": platform.python_version(),
        "libc": os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else "",
        "processor": _processor(),
        "paths": [ops.cpu_isa(), torch.backends.cpu.get_cpu_capability()],
        "threads": [torch.get_num_threads(), usable_cpus()],
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
    }


def _code() -> str:
    digest = hashlib.sha256()
    for path in (*sorted(PACKAGE.rglob("*.py")), LIBRARY):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGE)} {len(data)} ".encode() + data)
    return digest.hexdigest()


def _processor() -> str:
    """Name, stepping and flags of the first processor. Without Linux, the name that Python knows."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(line for line in first.splitlines() if line.split("\t")[0] in _PROCESSOR)


def key_of(content: str, options: Mapping[str, Any], build: Mapping[str, Any]) -> str:
    """The name of the entry for a model of this content, loaded with `options` by this `build_of`."""
    facts = {"content": content, "options": options, "build": build}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
