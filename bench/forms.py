"""One model in the formats of weights that a benchmark compares: the dtypes of a folder, and .gguf files that are made from it."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import torch

from bench.peers.catalogue import FLOAT32, OURS, QUANTISED, Choice
from bench.peers.engines.neap import load
from bench.peers.models import Models, environments
from shared.model.load import LoadedModel, load_model

# Weights in bfloat16, multiplied by inputs rounded to it.
BFLOAT16_PRODUCTS = "bfloat16-products"
FORMATS = (FLOAT32, *QUANTISED, BFLOAT16_PRODUCTS)
AS_STORED = "as stored"


@dataclass(frozen=True)
class Form:
    """`source` as for `load_model`."""

    title: str
    source: str

    def load(self) -> LoadedModel:
        if self.title == BFLOAT16_PRODUCTS:
            dtype = torch.bfloat16
            return load_model(self.source, dtype=dtype, compute_dtype=dtype)
        return load(self.source, self.title)


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
        return [Form(AS_STORED, options.model)]
    cache = options.cache.absolute()
    models = Models(Path(options.model), None, cache / "models", environments(cache, 1), print)
    return [
        Form(
            name,
            str(models.source(Choice(OURS, "bfloat16" if name == BFLOAT16_PRODUCTS else name))),
        )
        for name in options.formats
    ]
