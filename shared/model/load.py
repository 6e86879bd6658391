"""Loads a frozen model from a folder, a file or the hub into the form that runners need."""

import struct
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from shared.errors import NotFound, UnsupportedModel
from shared.model.fingerprint import fingerprint
from shared.model.own_thread import run_in_own_thread
from shared.model.parts import ModelParts, find_parts

log = structlog.get_logger("neap.model")

# For configs that state no limit.
DEFAULT_CONTEXT_LENGTH = 4096


@dataclass(frozen=True)
class LoadedModel:
    """A frozen model and its parts. `fingerprint` identifies architecture and weights, independently of the dtype."""

    model_id: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    parts: ModelParts
    fingerprint: str
    context_length: int
    eos_token_ids: frozenset[int]

    @property
    def num_layers(self) -> int:
        return self.parts.num_layers

    @property
    def hidden_size(self) -> int:
        return self.parts.hidden_size

    @property
    def vocabulary_size(self) -> int:
        return self.parts.vocabulary_size

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def architecture(self) -> str:
        return type(self.model).__name__


def load_model(
    source: str | Path,
    *,
    model_id: str | None = None,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    context_length: int | None = None,
    accelerate: bool = True,
) -> LoadedModel:
    """Loads a Hugging Face folder, a .gguf file, or a model by its hub name.

    `dtype` None: float32 on a CPU, the checkpoint's own on other devices. Weights are read from safetensors or GGUF, never from a
    pickle. `context_length`: an upper limit, in tokens, below the model's own. `accelerate` is as in `wrap_model`. Logs the size on disk
    before loading and the seconds taken afterwards.
    Raises `NotFound` (reason MODEL_NOT_FOUND) and `UnsupportedModel`.
    """
    started_s = time.monotonic()
    name = model_id or str(source)
    log.info("loading model", model_id=name, source=str(source), size_mb=_size_mb(Path(source)))
    loaded = run_in_own_thread(
        _load_model,
        source,
        model_id=model_id,
        dtype=dtype,
        device=device,
        context_length=context_length,
        accelerate=accelerate,
    )
    log.info(
        "model loaded",
        model_id=name,
        seconds=round(time.monotonic() - started_s, 1),
        fingerprint=loaded.fingerprint,
    )
    return loaded


def _load_model(
    source: str | Path,
    *,
    model_id: str | None,
    dtype: torch.dtype | None,
    device: str,
    context_length: int | None,
    accelerate: bool,
) -> LoadedModel:
    path = Path(source)
    # Code that comes with a model is never run. If this were not set, transformers would ask on standard input.
    no_code: dict[str, Any] = {"trust_remote_code": False}
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(source), **no_code}
    if path.suffix == ".gguf":
        if not path.is_file():
            raise _not_found(source, "there is no such file")
        folder, name = str(path.parent), path.name
        where = {"pretrained_model_name_or_path": folder, "gguf_file": name, **no_code}
    elif path.exists() and not (path / "config.json").is_file():
        raise _not_found(source, "the folder has no config.json")
    elif not path.exists() and (path.is_absolute() or str(source).startswith(".")):
        raise _not_found(source, "there is no such folder")
    if dtype is None:
        dtype_choice: torch.dtype | str = torch.float32 if device == "cpu" else "auto"
    else:
        dtype_choice = dtype
    try:
        weights: dict[str, Any] = {} if "gguf_file" in where else {"use_safetensors": True}
        with _reading(is_gguf="gguf_file" in where):
            model = AutoModelForCausalLM.from_pretrained(**where, **weights, dtype=dtype_choice)
            tokenizer = AutoTokenizer.from_pretrained(**where)
    except OSError as error:
        log.warning("cannot load model", source=str(source), exc_info=True)
        raise _not_found(source, "its files are missing or unreadable") from error
    except (ValueError, KeyError, IndexError, struct.error) as error:
        log.warning("cannot load model", source=str(source), exc_info=True)
        raise UnsupportedModel(
            f"transformers does not know how to load {source} as a causal language model",
            metadata={"source": str(source)},
        ) from error
    placed: Any = model
    placed = placed.to(
        device
    )  # `Any`, because the decorator of this method upstream hides its type
    return wrap_model(
        placed,
        tokenizer,
        model_id=model_id or str(source),
        context_length=context_length,
        accelerate=accelerate,
    )


def wrap_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    model_id: str = "local",
    context_length: int | None = None,
    accelerate: bool = False,
) -> LoadedModel:
    """Freezes a model that is already built, and finds its parts.

    `accelerate`: whether a float32 model on a CPU runs on neap's kernels, with packed weights. Raises `UnsupportedModel`.
    """
    model.requires_grad_(False).eval()
    parts = find_parts(model)
    limit = (
        getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        or DEFAULT_CONTEXT_LENGTH
    )
    identity = fingerprint(model)  # before `accelerate` frees the unpacked weights
    if accelerate and model.device.type == "cpu" and model.dtype == torch.float32:
        from shared.model.substitution.apply import accelerate as accelerate_model

        log.info("accelerated", model_id=model_id, replaced=str(accelerate_model(model)))
    return LoadedModel(
        model_id=model_id,
        model=model,
        tokenizer=tokenizer,
        parts=parts,
        fingerprint=identity,
        context_length=min(context_length or limit, limit),
        eos_token_ids=_eos_token_ids(model),
    )


def _reading(*, is_gguf: bool) -> AbstractContextManager[None]:
    if not is_gguf:
        return nullcontext()
    # Imported here: most processes read no such file.
    from shared.model.gguf import read_once

    return read_once()


def _size_mb(path: Path) -> float | None:
    """Size of the weights on disk, in MB. None if they are on the hub or in its cache."""
    if path.is_file():
        return round(path.stat().st_size / 1e6, 1)
    files = [*path.glob("*.safetensors")] if path.is_dir() else []
    return round(sum(file.stat().st_size for file in files) / 1e6, 1) if files else None


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """From the generation config, as Hugging Face's own `generate`. It has one id or a list."""
    generation = getattr(model, "generation_config", None)
    ids = generation.eos_token_id if generation is not None else None
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def _not_found(source: str | Path, why: str) -> NotFound:
    return NotFound(
        f"model {str(source)!r} cannot be loaded: {why}",
        reason="MODEL_NOT_FOUND",
        metadata={"source": str(source)},
    )
