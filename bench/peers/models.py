"""The model in the form that each engine reads, converted once and kept in the cache folder."""

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.peers.catalogue import FLOAT32, GIVEN, OURS, PEERS, QUANTISED, ROUNDED, Choice
from bench.peers.environment import Environment
from bench.peers.gguf_file import file_type, write_gguf
from shared.errors import NotFound

LLAMA_CPP, OPENVINO = "llama.cpp", "openvino"
OPENVINO_FORMATS = {FLOAT32: "fp32", "int8": "int8"}


class Models:
    """Forms of the model in `folder`, a Hugging Face folder with float32 or 16-bit safetensors. A .gguf file in its
    place has one form, itself.

    `given`: a .gguf file for the format GIVEN, or None. `cache`: where conversions are kept, by the digest of the
    weights. `environments`: those of the peers that convert.
    """

    def __init__(
        self,
        folder: Path,
        given: Path | None,
        cache: Path,
        environments: Mapping[str, Environment],
        say: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._given = given
        self._cache = cache / digest(folder)
        self._environments = environments
        self._say = say
        self._cache.mkdir(parents=True, exist_ok=True)

    def source(self, choice: Choice) -> Path:
        """The file or folder that this worker loads. Raises `NotFound`, `UnsupportedModel` and `SetUpFailed`."""
        if self._folder.is_file() and choice.weights != GIVEN:
            raise NotFound(f"{choice.weights} has to be made from a Hugging Face folder")
        if choice.peer.folder == PEERS[LLAMA_CPP].folder:
            return self._gguf(choice.weights)
        if choice.peer.folder == PEERS[OPENVINO].folder:
            return self._exported(choice.weights)
        is_type_of_folder = choice.weights in (FLOAT32, "float16", "bfloat16", *ROUNDED)
        if choice.name == OURS and not is_type_of_folder:
            return self._gguf(choice.weights)
        return self._folder

    def title(self, weights: str) -> str:
        """What the table calls a format: the type of the file's weights for GIVEN."""
        return file_type(self._given) if weights == GIVEN and self._given else weights

    def _gguf(self, weights: str) -> Path:
        if weights == GIVEN:
            if self._given is None:
                raise NotFound("no .gguf file was given (--gguf FILE)")
            return self._given
        if weights == FLOAT32:
            return self._made("float32.gguf", lambda path: write_gguf(self._folder, path))

        def quantise(path: Path) -> None:
            environment = self._environments[LLAMA_CPP]
            environment.ensure(self._say)
            command = environment.command(PEERS[LLAMA_CPP].module)
            command += ["quantise", str(self._gguf(FLOAT32)), str(path), QUANTISED[weights]]
            environment.run(command, f"quantise-{weights}")

        return self._made(f"{weights}.gguf", quantise)

    def _exported(self, weights: str) -> Path:
        def export(path: Path) -> None:
            environment = self._environments[OPENVINO]
            command = [str(environment.python.with_name("optimum-cli")), "export", "openvino"]
            command += ["--model", str(self._folder), "--task", "text-generation-with-past"]
            command += ["--weight-format", OPENVINO_FORMATS[weights], str(path)]
            environment.run(command, f"export-{weights}")

        return self._made(f"openvino-{weights}", export)

    def _made(self, name: str, make: Callable[[Path], None]) -> Path:
        """`name` in the cache, by `make` if it is not there. It is there in full or not at all."""
        target = self._cache / name
        if not target.exists():
            self._say(f"converting the model: {name}")
            with tempfile.TemporaryDirectory(dir=self._cache, prefix=".making-") as work:
                made = Path(work) / name
                make(made)
                made.rename(target)
        return target


def environments(cache: Path, build_jobs: int) -> dict[str, Environment]:
    """The environments of all peers that need one, by name, below the folder `cache`. Sets none of them up."""
    return {
        name: Environment(cache / "peers" / peer.folder, peer.requirements, build_jobs)
        for name, peer in PEERS.items()
        if peer.requirements is not None
    }


def digest(folder: Path) -> str:
    """The digest of config and weights, or of a file. Raises `NotFound` if the folder has no safetensors."""
    if folder.is_file():
        with folder.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    weights = sorted(folder.glob("*.safetensors"))
    if not weights or not (folder / "config.json").is_file():
        raise NotFound(f"{folder} must be a Hugging Face folder with config.json and *.safetensors")
    found = hashlib.sha256()
    for path in [folder / "config.json", *weights]:
        with path.open("rb") as stream:
            found.update(hashlib.file_digest(stream, "sha256").digest())
    return found.hexdigest()[:16]
