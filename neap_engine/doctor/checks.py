"""The checks that apply to given settings: of the registry, and of each model, what of it runs on neap's kernels."""

import dataclasses
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from neap_engine.doctor import machine
from neap_engine.doctor.finding import Check, Finding, Status
from shared.config import unknown_variables
from shared.configured_model import load_configured, load_options
from shared.engine.memory.budget import available_bytes
from shared.model.footprint import footprint
from shared.model.loaded import LoadedModel
from shared.model.numerics import Numerics, numerics_of
from shared.model.paged_head import HEAD_BUCKETS
from shared.model.runner import Runner
from shared.model.runners import make_runner
from shared.model.substitution.apply import AccelerationReport
from shared.registry.address import RegistryAddress
from shared.registry.factory import folder_of, open_registry
from shared.registry.registry import Registry
from shared.service_settings import ModelSource
from shared.worker_settings import WorkerSettings


def checks(settings: WorkerSettings, *, loads_models: bool) -> list[Check]:
    """The checks in the order in which they are worth reading. Only those of models take long."""
    on_gpu = settings.device.startswith("cuda")
    card = settings.device if on_gpu else "cuda"
    compiles = on_gpu and settings.compile_layers != "off"
    model_ids = [source.model_id for source in settings.models]
    models = [Check(f"model {source.model_id}", partial(model, source, settings)) for source in settings.models]
    return [
        Check("versions", machine.versions),
        Check("variables", variables),
        Check("CPU kernels", partial(machine.cpu_kernels, settings.cpu_path)),
        Check("GPU", partial(machine.gpu, on_gpu, card)),
        Check("CUDA kernels", partial(machine.cuda_kernels, on_gpu, card)),
        Check("nvcc", machine.compiler),
        Check("torch.compile", partial(machine.layer_compiler, compiles)),
        Check("registry", partial(registry, settings.registry, model_ids)),
        *(Check(_memory_of(source), partial(memory, source, settings)) for source in settings.models),
        *(models if loads_models and models else [Check("models", partial(no_model, loads_models))]),
    ]


def variables() -> Finding:
    """Looks for variables NEAP_.. that nothing reads. No service starts with one."""
    problems = unknown_variables()
    if problems:
        return Finding("variables", "broken", "; ".join(problems), "correct or unset them")
    return Finding("variables", "ok", "every variable NEAP_.. is known")


def no_model(loads_models: bool) -> Finding:
    if not loads_models:
        return Finding("models", "off", "not loaded, as asked")
    return Finding("models", "off", "none is named", "give --model ID=SOURCE or set NEAP_MODELS")


def registry(url: str, model_ids: Sequence[str]) -> Finding:
    """Opens the registry as the services do, reads the newest versions of the models, and writes a probe.

    A folder that does not exist is left to the first service. Raises the registry's errors.
    """
    folder = folder_of(url)
    if folder is not None and not folder.exists():
        return _future_folder(folder)
    with closing(open_registry(url)) as opened:
        newest = {model_id: _newest(opened, model_id) for model_id in model_ids}
        opened.check_writable()
    where = str(folder) if folder is not None else _described(RegistryAddress.parse(url))
    routers = [
        f"{model_id} has {f'version {number}' if number else 'no router yet: exact drafts by look-up alone'}"
        for model_id, number in newest.items()
    ]
    detail = "; ".join([f"{where} can be read and written", *routers])
    return Finding("registry", "ok", detail, facts={"newest_versions": newest})


def _future_folder(folder: Path) -> Finding:
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    with TemporaryDirectory(dir=above, prefix=".neap-"):
        pass
    detail = f"{folder} does not exist; the first service that starts creates it"
    return Finding("registry", "ok", detail, facts={"newest_versions": {}})


def _newest(opened: Registry, model_id: str) -> int | None:
    listed = opened.list_versions(model_id, limit=1)
    return listed[0].version if listed else None


def _described(address: RegistryAddress) -> str:
    # Without the URL of Redis, which may contain a password.
    index = "Redis with " if address.redis_url else ""
    return f"{index}s3://{address.bucket}/{address.prefix}".rstrip("/")


# What a worker takes beside weights, keys and values, in MB, and how much more at the peak of its first start, of that
# and of the weights, beside the largest matrix, which is read when all others may be packed (bench/RESULTS.md, Starts).
# What a GPU's driver, graphs and routers take is of card_budget's tenth.
OWN_MB, FIRST_MB, FIRST_SHARE = 480, 80, 0.1
CARD_OWN_MB = 800
REQUEST_TOKENS = 2048


def _memory_of(source: ModelSource) -> str:
    return f"memory of {source.model_id}"


def memory(source: ModelSource, settings: WorkerSettings) -> Finding:
    """Compares what a worker will take with what is free, by the headers of the model's files. Broken if it is more.
    Raises as `footprint`."""
    name, device = _memory_of(source), torch.device(settings.device)
    options = load_options(settings)
    dtypes = {key: options[key] for key in ("dtype", "kv_dtype", "context_length")}
    found = footprint(source.source, device, **dtypes)
    if found is None:
        return Finding(name, "off", "known beforehand only of files on this machine in formats of neap's own")
    weights_mb = found.weights / 1e6
    request = min(REQUEST_TOKENS, found.context_length)
    facts = {
        "weights_mb": round(weights_mb),
        "kv_bytes_per_token": found.kv_token,
        "request_mb": round(found.kv_token * request / 1e6),
    }
    keys = f"keys and values: {found.kv_token / 1e3:.0f} kB a token, {facts['request_mb']} MB for {request} tokens"
    if device.type == "cuda":
        rows_mb = HEAD_BUCKETS[-1] * found.head_row / 1e6
        needed_mb = first_mb = weights_mb + CARD_OWN_MB + rows_mb
        detail = f"a worker takes {needed_mb:.0f} MB of the GPU, and {weights_mb:.0f} MB of the machine while it loads"
    else:
        needed_mb = weights_mb + OWN_MB
        first_mb = needed_mb + FIRST_MB + found.largest / 1e6 + FIRST_SHARE * weights_mb
        detail = f"a worker takes {needed_mb:.0f} MB, and up to {first_mb:.0f} MB while it starts for the first time"
    facts |= {"needed_mb": round(needed_mb), "first_start_mb": round(first_mb)}
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        return Finding(name, "off", f"{detail}; {keys}; there is no usable GPU to compare with", facts=facts)
    free_mb = available_bytes(device) / 1e6
    fits = first_mb + facts["request_mb"] <= free_mb
    detail = f"{detail}; {keys}; {free_mb:.0f} MB are free"
    advice = "" if fits else "give it more memory, or take a smaller file, or set --context-length or --kv-dtype"
    return Finding(name, "ok" if fits else "broken", detail, advice, facts | {"free_mb": round(free_mb)})


# Enough for the runner to check itself. A worker chooses by the free memory.
KV_BUDGET_BYTES = 64 << 20


def model(source: ModelSource, settings: WorkerSettings) -> Finding:
    """Loads the model as a worker does, and makes the runner that a worker would use. Raises what these raise.

    Broken if a setting demands what they do not do. Not loaded where `memory` is broken.
    """
    # If its files cannot be read, that has no facts, and loading says more.
    before = Check(_memory_of(source), partial(memory, source, settings)).finding()
    if before.status == "broken" and before.facts:
        return Finding(f"model {source.model_id}", "off", "not loaded, because it would take more memory than is free")
    loaded = load_configured(source, settings)
    status: Status = "ok"
    facts: dict[str, Any] = {
        "architecture": loaded.architecture,
        "num_layers": loaded.num_layers,
        "context_length": loaded.context_length,
        "fingerprint": loaded.fingerprint,
    }
    runner = make_runner(loaded, KV_BUDGET_BYTES)
    numerics = numerics_of(runner)
    if loaded.device.type == "cuda":
        status, how = described_runner(runner, settings)
        facts |= {"records_passes": runner.records, "compiles_layers": runner.compiles}
    elif loaded.acceleration is None:
        how = "runs the modules of the package that quantised it, not neap's kernels"
    else:
        how = described_acceleration(loaded.acceleration, loaded)
        facts |= dataclasses.asdict(loaded.acceleration)
    facts |= {"numerics_id": numerics.id, "is_exact": numerics.is_exact}
    if settings.require_exact and not numerics.is_exact:
        status = "broken"
    size = f"{loaded.architecture}, {loaded.num_layers} layers, context {loaded.context_length}"
    detail = f"{size}; {how}; {described_promise(numerics)}"
    return Finding(f"model {source.model_id}", status, detail, facts=facts)


def described_runner(runner: Runner, settings: WorkerSettings) -> tuple[Status, str]:
    """Say whether passes are recorded and layers compiled. Broken if a setting demands what the runner does not do."""
    demanded = settings.record_passes, settings.compile_layers
    does = runner.records, runner.compiles
    reasons = runner.why_not_recorded, runner.why_not_compiled
    says: list[str] = []
    status: Status = "ok"
    for name, is_wanted, is_done, reason in zip(
        ("passes recorded", "layers compiled"), demanded, does, reasons, strict=True
    ):
        says.append(name if is_done else f"not {name} ({reason})")
        if is_wanted == "on" and not is_done:
            status = "broken"
    return status, "; ".join(says)


def described_acceleration(report: AccelerationReport, loaded: LoadedModel) -> str:
    """Say which of the model's modules run on neap's CPU kernels, and why the first of the others does not."""
    on_kernels = {
        "linear layers": report.linears,
        "gated MLPs": report.gated_mlps,
        "norms": report.norms,
        "embeddings": report.embeddings,
    }
    parts = [f"{number} {name}" for name, number in on_kernels.items() if number]
    parts += ["attention"] if report.attention else []
    parts += ["rotary embedding"] if report.rotary else []
    text = f"{report.layers} of {loaded.num_layers} layers run as one kernel; on kernels: "
    text += ", ".join(parts) or "nothing"
    if report.left_alone:
        name, reason = next(iter(report.left_alone.items()))
        text += f"; {len(report.left_alone)} modules keep their own code, such as {name}: {reason}"
    return text


def described_promise(numerics: Numerics) -> str:
    """Say whether exact gives the tokens of full, and the id of the bits."""
    if numerics.is_exact:
        return f"exact gives the tokens of full; numerics {numerics.id}"
    return f"exact may differ from full at near ties, because {numerics.why_not}; numerics {numerics.id}"
