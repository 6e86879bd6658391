"""One model in the formats of weights that a benchmark compares: the dtypes of a folder, and .gguf files that are made
from it."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from bench.peers.catalogue import FLOAT32, OURS, QUANTISED, ROUNDED, Choice
from bench.peers.engines.neap import load
from bench.peers.models import Models, environments
from shared.model.loaded import LoadedModel

FORMATS = (FLOAT32, *QUANTISED, *ROUNDED)
AS_STORED = "as stored"


@dataclass(frozen=True)
class Form:
    """`weights`: the name of the format, or AS_STORED; `source` as for `load_model`."""

    weights: str
    source: str

    def load(self) -> LoadedModel:
        return load(self.source, self.weights)


def add_formats(parser: argparse.ArgumentParser) -> None:
    """Adds --formats, and --cache for the files that are made."""
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=FORMATS,
        metavar="FORMAT",
        help=f"formats of weights: {', '.join(FORMATS)}. Those of GGUF are made from a folder by llama.cpp, which is "
        "compiled once. Default: as the model is stored",
    )
    add_cache(parser)


def add_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache", type=Path, default=platformdirs.user_cache_path("neap-bench"))


def forms(options: argparse.Namespace) -> list[Form]:
    """The forms that the options of `add_formats` and --model name.
    Raises `NotFound`, `UnsupportedModel` and `SetUpFailed`."""
    if not options.formats:
        return [Form(AS_STORED, options.model)]
    cache = options.cache.absolute()
    models = Models(Path(options.model), None, cache / "models", environments(cache, 1), print)
    return [Form(name, str(models.source(Choice(OURS, name)))) for name in options.formats]
