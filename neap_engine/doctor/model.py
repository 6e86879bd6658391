"""The check of a model: whether it loads, and what of it runs on neap's kernels."""

import dataclasses
from typing import Any

from neap_engine.doctor.finding import Finding, Status
from shared.configured_model import load_configured
from shared.model.loaded import LoadedModel
from shared.model.numerics import Numerics, numerics_of
from shared.model.runner import Runner
from shared.model.runners import make_runner
from shared.model.substitution.apply import AccelerationReport
from shared.service_settings import ModelSource, WorkerSettings

# Enough for the runner to check itself. A worker chooses by the free memory.
KV_BUDGET_BYTES = 64 << 20


def model(source: ModelSource, settings: WorkerSettings) -> Finding:
    """Loads the model as a worker does, and makes the runner that a worker would use. Raises what these raise.

    Broken if a setting demands what they do not do.
    """
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
