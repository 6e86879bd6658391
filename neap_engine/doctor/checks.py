"""The checks that apply to given settings."""

from functools import partial

from neap_engine.doctor import machine
from neap_engine.doctor.finding import Check, Finding
from neap_engine.doctor.model import model
from neap_engine.doctor.registry import registry
from shared.config import unknown_variables
from shared.service_settings import WorkerSettings


def checks(settings: WorkerSettings, *, loads_models: bool) -> list[Check]:
    """The checks in the order in which they are worth reading. Only those of models take long."""
    on_gpu = settings.device.startswith("cuda")
    compiles = on_gpu and settings.compile_layers != "off"
    model_ids = [source.model_id for source in settings.models]
    models = [Check(f"model {source.model_id}", partial(model, source, settings)) for source in settings.models]
    return [
        Check("versions", machine.versions),
        Check("variables", variables),
        Check("CPU kernels", partial(machine.cpu_kernels, settings.cpu_path)),
        Check("GPU", partial(machine.gpu, on_gpu)),
        Check("CUDA kernels", partial(machine.cuda_kernels, on_gpu)),
        Check("torch.compile", partial(machine.layer_compiler, compiles)),
        Check("registry", partial(registry, settings.registry, model_ids)),
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
