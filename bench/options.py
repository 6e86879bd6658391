"""The flags and the set-up that benchmarks share."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.prompts import DEFAULT_FILE
from shared.configured_model import dtype_named
from shared.model.load import load_model
from shared.model.loaded import LoadedModel

DTYPES = ("auto", "float32", "float16", "bfloat16", "int8")


def make_parser(
    doc: str | None, *, model: bool = True, router: bool = False, many: bool = False
) -> argparse.ArgumentParser:
    """A parser with --model and, for `router`, --router, which take several values for `many`: see `each_model`.

    `doc`: the program's docstring.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False)
    nargs = "+" if many else None
    if model:
        text = "Hugging Face folder, .gguf file or hub name" + "; several are measured in turn" * many  # fmt: skip
        parser.add_argument("--model", required=True, nargs=nargs, help=text)
    if router:
        text = "folder with manifest.json and its blob" + "; one for each model" * many
        parser.add_argument("--router", type=Path, required=True, nargs=nargs, help=text)
    return parser


def add_prompts(parser: argparse.ArgumentParser, per_task: int) -> None:
    """Adds --prompts, and --per-task with the default `per_task`."""
    parser.add_argument("--prompts", type=Path, default=DEFAULT_FILE)
    parser.add_argument("--per-task", type=int, default=per_task, help="prompts; 0: all")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")


def add_dtypes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES[:-1], help="of weights; default: as stored")
    parser.add_argument("--compute-dtype", choices=DTYPES, help="of products, as --compute-dtype of the services")


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line, or of `arguments`. Ends the program if --device names a missing GPU. Silences
    transformers."""
    options = parser.parse_args(arguments)
    if getattr(options, "device", "cpu") == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    silence_transformers()
    return options


def each_model(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> Iterator[argparse.Namespace]:
    """The options of the command line for each --model, with its --router."""
    options = parsed(parser, arguments)
    routers = getattr(options, "router", None) or [None] * len(options.model)
    if len(routers) != len(options.model):
        parser.error("there must be one --router for each --model")
    for model, router in zip(options.model, routers, strict=True):
        if len(options.model) > 1:
            print(f"\n== {model}", flush=True)
        yield argparse.Namespace(**{**vars(options), "model": model, "router": router})


def load(options: argparse.Namespace, **more: Any) -> LoadedModel:
    """The model that the flags name: --model, --device, --dtype, --compute-dtype. Raises as `load_model`."""
    names = ("dtype", "compute_dtype")
    dtypes = {name: dtype_named(getattr(options, name, None) or "auto") for name in names}
    device = getattr(options, "device", "cpu")
    return load_model(options.model, device=device, **{**dtypes, **more})


def silence_transformers() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
