"""The flags and the set-up that benchmarks share."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from bench.prompts import DEFAULT_FILE


def make_parser(doc: str | None, *, router: bool = False) -> argparse.ArgumentParser:
    """A parser with --model and, for `router`, --router. `doc` is the program's docstring."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--model", required=True, help="Hugging Face folder, .gguf file or hub name"
    )
    if router:
        parser.add_argument(
            "--router", type=Path, required=True, help="folder with manifest.json and its blob"
        )
    return parser


def add_prompts(parser: argparse.ArgumentParser, per_task: int) -> None:
    """Adds --prompts, and --per-task with the default `per_task`."""
    parser.add_argument("--prompts", type=Path, default=DEFAULT_FILE)
    parser.add_argument("--per-task", type=int, default=per_task, help="prompts; 0: all")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")


def parsed(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """The options of the command line, or of `arguments`. Ends the program if --device names a missing GPU. Silences transformers."""
    options = parser.parse_args(arguments)
    if getattr(options, "device", "cpu") == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    silence_transformers()
    return options


def silence_transformers() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
