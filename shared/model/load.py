"""Loads a frozen model from a folder, a file or the hub into the form that runners need."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from shared.errors import Exhausted, InvalidInput, NeapError, PreconditionFailed, UnsupportedModel
from shared.memory import release_free_memory
from shared.model.cache import is_out_of_memory
from shared.model.dtypes import sixteen_bits
from shared.model.fingerprint import Identity, fingerprint, is_large, later_fingerprint, pack_ahead
from shared.model.loaded import LoadedModel, wrap_model
from shared.model.own_thread import run_in_own_thread
from shared.model.parts import refuse_config
from shared.model.remembered.facts import Facts
from shared.model.remembered.store import StartEntry, StartStore
from shared.model.source import arguments_of, missing_model, size_mb
from shared.model.weights.lazy import lazy, realise
from shared.model.weights.on_device import TakenBlocks
from shared.model.weights.quantised import dequantises, missing_package, quantisation
from shared.model.weights.reading import CheckpointFiles, replaced, safetensors_replacements, scheme_of
from shared.ops.cards import check_card
from shared.ops.paged_on_gpu import has_triton

if TYPE_CHECKING:
    from shared.model.ranks.group import Ranks
    from shared.model.weights.gguf import GgufReaders


log = structlog.get_logger("neap.model")


def load_model(
    source: str | Path,
    *,
    model_id: str | None = None,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    context_length: int | None = None,
    accelerate: bool = True,
    invariant: bool = False,
    kv_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype | None = None,
    store: StartStore | None = None,
    ranks: "Ranks | None" = None,
) -> LoadedModel:
    """Loads a Hugging Face folder, a .gguf file, or a model by its hub name.

    `dtype`: the format that weights are kept in; None: the one they are stored in. On a CPU everything is computed in
    float32, whatever the format, and a matrix is packed as soon as it is read; other devices also compute in `dtype`,
    and take `sixteen_bits` for a .gguf file if it is None, whose matrices then stay in its blocks. Weights are read
    from safetensors or GGUF, never a pickle. `context_length`: an upper limit, in tokens, below the model's own.
    `accelerate`, `invariant`, `kv_dtype` and `compute_dtype` are as in `shared.model.loaded.wrap_model`. `store`: what
    earlier starts have proven, measured and packed for this model is taken from there, if it is to run on a CPU from
    files of this machine. `LoadedModel.facts.keep` puts there what this start has found out. The fingerprint of a
    large model is found out when somebody asks for it, from the same files. Logs the size on disk before loading, and
    the seconds taken and the formats of the weights afterwards.
    `ranks`: those that share the weights; all of them call this with the same arguments. Nothing is remembered then.

    Raises `NotFound` (reason MODEL_NOT_FOUND), `PermissionDenied` (MODEL_GATED), `UnsupportedModel` (also with reason
    PACKAGE_MISSING), `Corrupt` (MODEL_FILE_CORRUPT), `Unavailable` (MODEL_FILE_CHANGED, HUB_UNAVAILABLE), `Exhausted`
    (OUT_OF_MEMORY), the errors of `check_device`, and with `ranks` `PreconditionFailed` (RANKS_DIFFER) and
    `UnsupportedModel` (TENSOR_PARALLEL_NOT_SUPPORTED).
    """
    started_s = time.monotonic()
    check_device(device, serves=True)
    name = model_id or str(source)
    log.info("loading model", model_id=name, source=str(source), size_mb=size_mb(Path(source)))
    options: dict[str, Any] = {
        "dtype": dtype,
        "context_length": context_length,
        "accelerate": accelerate,
        "invariant": invariant and device != "cpu",  # where kernels do not depend on company anyway
        "kv_dtype": kv_dtype,
        "compute_dtype": compute_dtype,
    }
    keeps = store is not None and device == "cpu" and ranks is None
    entry = store.entry(source, options) if store is not None and keeps else None
    loaded = run_in_own_thread(_load_model, source, model_id=name, device=device, entry=entry, ranks=ranks, **options)
    load_s = time.monotonic() - started_s
    log.info(
        "model loaded",
        model_id=name,
        remembered=bool(loaded.facts.earlier),
        seconds=round(load_s, 1),
        fingerprint=loaded.fingerprint if loaded.identity.is_known else None,
    )
    return replace(loaded, source=str(source), load_s=load_s, ranks=ranks)


def _load_model(
    source: str | Path,
    *,
    model_id: str,
    dtype: torch.dtype | None,
    device: str,
    accelerate: bool,
    entry: StartEntry | None,
    ranks: "Ranks | None",
    **options: Any,
) -> LoadedModel:
    """`options`: those of `wrap_model`."""
    facts, matrices = (Facts(), None) if entry is None else (entry.facts, entry.matrices)
    where = arguments_of(source)
    theirs = f"transformers cannot load {source} as a causal language model"
    with CheckpointFiles(dtype, matrices) as checkpoint, _load_errors(source, f"neap cannot prepare {source}"):
        gguf = _gguf_readers(checkpoint, facts) if "gguf_file" in where else None
        readers = gguf.replacements if gguf else []
        with _load_errors(source, theirs), replaced(readers):
            config = AutoConfig.from_pretrained(**where)
        refuse_config(config)
        sharding = None if ranks is None else _sharding(config, ranks, model_id, where)
        scheme = scheme_of(config)
        if scheme is not None:  # neap reads the matrices, into modules of its own
            del config.quantization_config
        method = quantisation(config)
        on_cpu = device == "cpu"
        # On a CPU everything but the matrices is float32. Quantised modules compute in the dtype of their checkpoint.
        in_float32 = on_cpu and method is None
        if "gguf_file" not in where:
            lazy_ones = (in_float32 or scheme is not None) and ranks is None
            readers = safetensors_replacements(checkpoint, lazy=lazy_ones, scheme=scheme)
        if ranks is not None:
            from shared.model.ranks.sharding import mesh_replacement

            readers = [*readers, mesh_replacement(ranks)]
        with replaced(readers), _load_errors(source, theirs):
            # A .gguf file names no dtype to compute in, and transformers would take float32.
            default = sixteen_bits(torch.device(device)) if "gguf_file" in where else "auto"
            is_in_blocks = "gguf_file" in where or scheme is not None
            stays_in_blocks = _stays_in_blocks(is_in_blocks and accelerate, device, dtype)
            kept = {**where, "config": config} if scheme is not None else where
            model = _build(kept, torch.float32 if in_float32 or stays_in_blocks else dtype or default, sharding)
            # Matrices are packed while Python makes the tokenizer.
            with ThreadPoolExecutor(1, "neap-pack") as pool:
                packing = None if facts.earlier else pool.submit(pack_ahead, model)
                tokenizer = AutoTokenizer.from_pretrained(**where)
                if gguf:
                    gguf.complete(Path(source), model, tokenizer)
        gguf, readers = None, []  # they have the file's metadata
        if entry is not None:
            entry.check()
        if packing is not None:
            packing.result()
        if "fingerprint" not in facts.earlier and in_float32 and accelerate and is_large(model):
            hash_weights = later_fingerprint(model)
            checkpoint.stay_open()

            def find_out(between: Callable[[], None]) -> str:
                with checkpoint:
                    return facts.recall("fingerprint", partial(hash_weights, between))

            identity = Identity(find_out)
        else:
            identity = Identity.of(facts.recall("fingerprint", partial(fingerprint, model)))
        if ranks is not None:
            from shared.model.ranks.sharding import localise

            localise(model, ranks)
            ranks.begin_passes()
        release_free_memory()
        taken = TakenBlocks(model) if stays_in_blocks else None
        if not accelerate or not on_cpu:
            realise(model)
        if in_float32 and (dtype or config.dtype) not in (None, torch.float32):
            checkpoint.dequantised |= {
                name: "a parameter of several matrices is read as float32"
                for name, parameter in model.named_parameters()
                if parameter.dim() > 2 and lazy(parameter) is None
            }
        placed: Any = model  # `Any`, because the decorator of `to` upstream hides its type
        if not on_cpu:
            if taken is not None:
                taken.round_others(_sixteen_bits(config.dtype if scheme is not None else None, torch.device(device)))
            placed = placed.to(device)
            if taken is not None:
                taken.place(placed.device)
        if method is not None and _is_dequantised(placed, method, model_id) and on_cpu:
            nn.Module.float(placed)
        loaded = wrap_model(
            placed,
            tokenizer,
            model_id=model_id,
            accelerate=accelerate,
            identity=identity,
            facts=facts,
            **options,
        )
        if entry is not None:
            entry.keep_matrices()
    release_free_memory()
    if not on_cpu and loaded.model.dtype == torch.bfloat16 and sixteen_bits(loaded.device) != torch.bfloat16:
        log.warning(
            "this GPU has no arithmetic in bfloat16: --dtype float16 is faster", model_id=model_id, device=device
        )
    if checkpoint.dequantised:
        log.warning(
            "matrices were dequantised, which takes more memory",
            model_id=model_id,
            reasons=dict(Counter(checkpoint.dequantised.values())),
            first=next(iter(checkpoint.dequantised)),
        )
    return loaded


def _sixteen_bits(own: torch.dtype | None, device: torch.device) -> torch.dtype:
    """What a model in blocks computes in on a GPU: float16 if its checkpoint does."""
    return torch.float16 if own == torch.float16 else sixteen_bits(device)


def _stays_in_blocks(is_in_blocks: bool, device: str, dtype: torch.dtype | None) -> bool:
    """Whether a GPU multiplies by a checkpoint's blocks: unless another format is asked for."""
    return is_in_blocks and torch.device(device).type == "cuda" and dtype is None and has_triton()


def _is_dequantised(model: PreTrainedModel, method: str, model_id: str) -> bool:
    """Whether the weights of a quantised checkpoint are no longer quantised. Logs how they are served.
    Raises `UnsupportedModel`."""
    try:
        dequantised = dequantises(model)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UnsupportedModel(
            f"the quantised modules of {model_id} do not run on {model.device}", metadata={"method": method}
        ) from error
    if dequantised:
        log.warning(
            "quantised weights were dequantised, which takes more memory: no module multiplies by them on this device",
            model_id=model_id,
            method=method,
        )
    else:
        log.info(
            "the model is served by the quantised modules of its own package",
            model_id=model_id,
            method=method,
            dtype=str(model.dtype),
        )
    return dequantised


def _sharding(config: Any, ranks: "Ranks", model_id: str, where: Mapping[str, Any]) -> Any:
    """How transformers is to share the weights out, as the ranks agree. Raises `UnsupportedModel`
    (TENSOR_PARALLEL_NOT_SUPPORTED) and `PreconditionFailed` (RANKS_DIFFER)."""
    if "gguf_file" in where:
        raise UnsupportedModel(
            f"{model_id} cannot be run by {ranks.size} ranks: it is a .gguf file, and only folders are shared out",
            reason="TENSOR_PARALLEL_NOT_SUPPORTED",
            metadata={"model_id": model_id},
        )
    # Imported here: most processes have no ranks, and torch.distributed takes long to import.
    from shared.model.ranks.sharding import plan_of

    ranks.check_alike({"model": f"{model_id} {config.to_json_string(use_diff=False)}"})
    return plan_of(config, ranks, model_id)


def _build(where: Mapping[str, Any], dtype: torch.dtype | str, sharding: Any = None) -> PreTrainedModel:
    """Raises `UnsupportedModel` (reason WEIGHTS_MISSING) if the checkpoint lacks weights, which transformers would make
    up."""
    weights: dict[str, Any] = {} if "gguf_file" in where else {"use_safetensors": True}
    if sharding is not None:
        weights["distributed_config"] = sharding
    loaded: Any = AutoModelForCausalLM.from_pretrained(**where, **weights, dtype=dtype, output_loading_info=True)
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise UnsupportedModel(
            f"the checkpoint has no weights for {len(missing)} parameters of {type(model).__name__}, such as "
            f"{missing[0]}",
            reason="WEIGHTS_MISSING",
            metadata={"parameter": missing[0]},
        )
    built: PreTrainedModel = model
    return built


@contextmanager
def _load_errors(source: str | Path, failure: str) -> Iterator[None]:
    """Raises other errors than neap's as neap's, with the message `failure` if nothing more is known.
    The log has the error itself."""
    try:
        yield
    except NeapError:
        raise
    except ImportError as error:
        log.warning("cannot load model", source=str(source), exc_info=True)
        package = missing_package(error)
        raise UnsupportedModel(
            f"{source} needs the package {package}, which is not installed: install it, or take the model in 16 bits, "
            "as a .gguf file, or as a folder of AWQ or GPTQ, which neap reads itself",
            reason="PACKAGE_MISSING",
            metadata={"source": str(source), "package": package},
        ) from error
    except OSError as error:
        log.warning("cannot load model", source=str(source), exc_info=True)
        raise missing_model(source, "its files are missing or unreadable") from error
    except Exception as error:
        log.warning("cannot load model", source=str(source), exc_info=True)
        if is_out_of_memory(error):
            raise Exhausted(f"there is not enough memory for {source}", reason="OUT_OF_MEMORY") from error
        raise UnsupportedModel(
            f"{failure} ({type(error).__name__}; the log has the error)", metadata={"source": str(source)}
        ) from error


def _gguf_readers(checkpoint: CheckpointFiles, facts: Facts) -> "GgufReaders":
    # Imported here: most processes read no such file.
    from shared.model.weights.gguf import GgufReaders

    return GgufReaders(checkpoint, facts)


def check_device(name: str, *, serves: bool = False) -> None:
    """Raises `InvalidInput` (reason BAD_DEVICE) for a name that is no device, `PreconditionFailed` (DEVICE_UNAVAILABLE)
    with the reason if this process cannot use it. `serves`: as `check_card`, too, for a GPU.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidInput(f"device is {name!r}; it must be cpu or cuda", reason="BAD_DEVICE") from error
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count > 0:
        raise PreconditionFailed(
            f"the device {name} cannot be used: the last GPU that this process sees is cuda:{count - 1}. Set --device, "
            "or CUDA_VISIBLE_DEVICES if it hides others",
            reason="DEVICE_UNAVAILABLE",
        )
    try:
        torch.empty(1, device=device)
    # torch raises an AssertionError where it is built without CUDA.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).partition("\n")[0]
        raise PreconditionFailed(f"the device {name} cannot be used: {why}", reason="DEVICE_UNAVAILABLE") from error
    if serves and device.type == "cuda":
        check_card(device)
