"""An environment per peer engine, under the cache folder. An interrupted set-up goes on where it stopped."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.cpus import SPINS_VARIABLE
from shared.errors import NeapError

LOG_TAIL_LINES = 3
ROOT = Path(__file__).resolve().parents[2]


class SetUpFailed(NeapError):
    """A command of a set-up failed. The message names its log."""

    default_reason = "SET_UP_FAILED"


@dataclass(frozen=True)
class Requirements:
    """What an environment holds, pinned.

    `build`: packages that `source` needs to be built. `source`: a package that is built here from its source
    distribution, for this machine's own instructions. `excluded`: packages that others pull in and that must go again.
    """

    packages: tuple[str, ...] = ()
    build: tuple[str, ...] = ()
    source: str = ""
    excluded: tuple[str, ...] = ()


class Environment:
    """A virtual environment in `folder`/venv, with its logs beside it. `build_jobs`: processes that compile at once."""

    def __init__(self, folder: Path, requirements: Requirements, build_jobs: int = 1) -> None:
        self.folder = folder
        self._requirements = requirements
        self._build_jobs = build_jobs

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    def command(self, module: str) -> list[str]:
        return [str(self.python), "-m", module]

    def ensure(self, say: Callable[[str], None]) -> None:
        """Makes what is not there yet. Raises `SetUpFailed`."""
        stamp = self.folder / "installed.txt"
        wanted = f"{sys.version_info[:2]} {self._requirements}\n"
        if stamp.is_file() and stamp.read_text().startswith(wanted):
            return
        say(f"setting up {self.folder.name} in {self.folder}")
        self.folder.mkdir(parents=True, exist_ok=True)
        # A killed run may have left an environment without pip.
        if not (self.folder / "venv" / "bin" / "pip").is_file():
            self.run([sys.executable, "-m", "venv", str(self.folder / "venv")], "venv")
        if self._requirements.source:
            self._build()
        if self._requirements.packages:
            self._pip("install", *self._requirements.packages)
        if self._requirements.excluded:
            self._pip("uninstall", "--yes", *self._requirements.excluded)
        frozen = subprocess.run([*self.command("pip"), "freeze"], capture_output=True, text=True, check=True).stdout
        stamp.write_text(wanted + frozen)

    def run(self, command: Sequence[str], step: str, more: Mapping[str, str] | None = None) -> None:
        """Runs a command of the set-up, with its output in `folder`/`step`.log. Raises `SetUpFailed`."""
        log_path = self.folder / f"{step}.log"
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        with log_path.open("w") as log:
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**worker_environment(), "TMPDIR": str(temporary), **(more or {})},
                check=False,
            ).returncode
        if code:
            tail = log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            raise SetUpFailed(
                f"{self.folder.name}: {step} failed with status {code} (log {log_path}: {' / '.join(tail)})"
            )

    def _pip(self, *arguments: str) -> None:
        self.run([*self.command("pip"), "--no-input", *arguments], f"pip-{arguments[0]}")

    def _build(self) -> None:
        """Builds `source` for this machine, at the lowest priority: it may take an hour on a busy machine."""
        self._pip("install", *self._requirements.build)
        # The tools of this environment, not those of the system, which may be too old.
        path = f"{self.python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        tools = {"PATH": path, "CMAKE_BUILD_PARALLEL_LEVEL": str(self._build_jobs)}
        # More, for a machine whose instructions do not all run, are taken from the caller.
        flags = {"CMAKE_ARGS": f"-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF {os.environ.get('CMAKE_ARGS', '')}", **tools}
        source = self._requirements.source
        build = [*self.command("pip"), "--no-input", "install", "--verbose", "--no-build-isolation"]
        build += ["--no-binary", source.partition("==")[0], source]
        self.run(["nice", "-n", "19", *build], "build", flags)


def worker_environment() -> dict[str, str]:
    """Variables of every process that is started: neap's own modules can be imported, and no hub is asked. How threads
    wait is for each engine to say."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    own = {name: value for name, value in os.environ.items() if name != SPINS_VARIABLE}
    return {**own, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
