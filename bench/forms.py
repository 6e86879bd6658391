"""One model in the formats of weights that a benchmark compares: the dtypes of a folder, and .gguf files that are made from it."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from bench.peers.catalogue import FLOAT32, OURS, QUANTISED, Choice
from bench.peers.engines.neap import load
from bench.peers.models import Models, environments
from shared.model.loaded import LoadedModel

# Formats of weights whose inputs are rounded to them: the name of the form -> that of the format.
WITH_PRODUCTS = {"bfloat16-products": "bfloat16"}
FORMATS = (FLOAT32, *QUANTISED, *WITH_PRODUCTS)
AS_STORED = "as stored"


@dataclass(frozen=True)
class Form:
    """`source` as for `load_model`; `weights`: the format that they are kept in; `rounds_inputs`: whether they are multiplied in it."""

    title: str
    source: str
    weights: str
    rounds_inputs: bool = False

    def load(self) -> LoadedModel:
        return load(self.source, self.weights, rounds_inputs=self.rounds_inputs)


def add_formats(parser: argparse.ArgumentParser) -> None:
    """Adds --formats, and --cache for the files that are made."""
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=FORMATS,
        metavar="FORMAT",
        help=f"formats of weights: {', '.join(FORMATS)}. Those of GGUF are made from a folder by llama.cpp, which is compiled once. "
        "Default: as the model is stored",
    )
    parser.add_argument("--cache", type=Path, default=platformdirs.user_cache_path("neap-bench"))


def forms(options: argparse.Namespace) -> list[Form]:
    """The forms that the options of `add_formats` and --model name. Raises `NotFound`, `UnsupportedModel` and `SetUpFailed`."""
    if not options.formats:
        return [Form(AS_STORED, options.model, AS_STORED)]
    cache = options.cache.absolute()
    models = Models(Path(options.model), None, cache / "models", environments(cache, 1), print)
    found = []
    for name in options.formats:
        weights = WITH_PRODUCTS.get(name, name)
        source = str(models.source(Choice(OURS, weights)))
        found.append(Form(name, source, weights, rounds_inputs=name in WITH_PRODUCTS))
    return found
