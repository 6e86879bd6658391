"""What each service can be told, and the only place that reads the environment.

Every field has a variable `NEAP_<NAME>`; the listen addresses are `NEAP_WORKER_LISTEN` and `NEAP_CALIBRATOR_LISTEN` (and
`.._HEALTH_LISTEN`), so that both services can run from one environment. Lists are comma-separated. Command-line flags win over variables, variables over defaults.
A variable `NEAP_..` that nothing here has is an error of a service: a misspelt name would leave a setting at its default in silence.
Whether traces are exported is decided here, from the variables that every OpenTelemetry program has; the rest of them the SDK reads.
"""

import argparse
import difflib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from platformdirs import user_data_path
from pydantic import AliasChoices, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from shared.errors import InvalidInput
from shared.security_settings import ClientSettings, SecuritySettings, add_security_flags

PREFIX = "NEAP_"
# Read elsewhere: by the command line, the build and the tests.
_OTHER_VARIABLES = frozenset({"NEAP_TRACEBACK", "NEAP_BUILD_CUDA", "NEAP_FUZZ_S", "NEAP_FUZZ_SEED"})
# What Kubernetes puts into every pod for each Service whose name begins with "neap-" (NEAP_WORKER_SERVICE_HOST, NEAP_WORKER_PORT, ..).
_SERVICE_LINK = re.compile(
    r"NEAP_\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)

B = TypeVar("B", bound=BaseSettings)
S = TypeVar("S", bound="ServiceSettings")


@dataclass(frozen=True)
class ModelSource:
    """A model and where it is: a Hugging Face folder, a .gguf file, or a hub name."""

    model_id: str
    source: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """From "id=source". Raises ValueError."""
        model_id, equals, source = text.partition("=")
        if not (equals and model_id.strip() and source.strip()):
            raise ValueError(f"model is {text!r}; it must be ID=SOURCE")
        return cls(model_id.strip(), source.strip())


def _listed(value: Any) -> Any:
    """A comma-separated string as the list it stands for."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


class ServiceSettings(SecuritySettings):
    """What both services share. `registry`: a folder or file:///path, or redis://.. with a bucket (`shared.registry.address`);
    empty: a folder "registry" under `data_dir`. Give a URL with a password as NEAP_REGISTRY: flags show in process lists. The fields otel_*: see `exports_traces`."""

    model_config = SettingsConfigDict(
        env_prefix="NEAP_", frozen=True, extra="forbid", populate_by_name=True
    )

    models: Annotated[tuple[ModelSource, ...], NoDecode] = ()
    data_dir: Path = Field(default_factory=lambda: user_data_path("neap"))
    registry: str = Field(default="", repr=False)
    context_length: int | None = Field(default=None, ge=1)
    device: str = "cpu"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    threads: int | None = Field(default=None, ge=1)
    grace_s: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    drain_timeout_s: float = Field(default=60.0, ge=0, allow_inf_nan=False)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    otel_endpoint: str = Field(
        default="",
        validation_alias=AliasChoices(
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
        ),
    )
    otel_protocol: str = Field(
        default="",
        validation_alias=AliasChoices(
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
        ),
    )
    otel_exporter: str = Field(default="", validation_alias="OTEL_TRACES_EXPORTER")
    otel_disabled: str = Field(default="", validation_alias="OTEL_SDK_DISABLED")

    @property
    def exports_traces(self) -> bool:
        """Whether spans go to a collector: it is named, and nothing switches that off."""
        off = self.otel_disabled.lower() == "true" or self.otel_exporter == "none"
        return bool(self.otel_endpoint) and not off

    @field_validator("models", mode="before")
    @classmethod
    def _models_from_text(cls, value: Any) -> Any:
        parts = _listed(value)
        return tuple(ModelSource.parse(part) if isinstance(part, str) else part for part in parts)

    @model_validator(mode="after")
    def _resolved(self) -> Self:
        ids = [model.model_id for model in self.models]
        if len(ids) != len(set(ids)):
            raise ValueError("two models have the same id")
        if self.exports_traces and (
            self.otel_exporter not in ("", "otlp") or self.otel_protocol not in ("", "grpc")
        ):
            raise ValueError("traces can be exported with otlp over grpc and nothing else")
        if not self.registry:
            # Frozen from here on; this is still construction.
            object.__setattr__(self, "registry", str(self.data_dir / "registry"))
        return self


class WorkerSettings(ServiceSettings):
    """`max_running`: requests of a model that share each step. `max_queue` and `max_queue_tokens`: requests waiting per model and tokens of their prompts; beyond they are refused.
    `max_active_per_client`: waiting and running requests of one caller, by name or else by address; None: no limit. `kv_budget_mb`: for keys and values of all requests of a
    model, in MiB; None: half of what is free once it is loaded. `prefix_cache_mb`: of these, what ended requests may keep for
    others that start alike; None: a quarter; 0: nothing is shared. `stall_timeout_s`: how long a client may not read.
    `metrics_listen`: HOST:PORT for Prometheus over HTTP; empty: none. `default_alias`: the router of requests that name none.
    `router_cache_mb`: of a shared registry's routers, what is kept on disk under `data_dir`, in MiB; 0: nothing. `shadow_share`: of the greedy answers by policy relaxed, in [0, 1], what is compared with the full model in idle time.
    `record_passes`: replay passes as CUDA graphs; `compile_layers`: by torch.compile; "auto": on a GPU, where it works; "on": or do not start.
    `exit_decisions`: who decides which tokens go on between a router's exits: the host, reading once an exit, or the device by conditional nodes of CUDA graphs.
    `relaxed_bound`: the share of prompts on which they may differ where the router publishes no bound; None: any."""

    listen: str = Field(default="127.0.0.1:7071", validation_alias="NEAP_WORKER_LISTEN")
    health_listen: str = Field(default="", validation_alias="NEAP_WORKER_HEALTH_LISTEN")
    max_running: int = Field(default=16, ge=1)
    max_queue: int = Field(default=64, ge=1)
    max_queue_tokens: int = Field(default=1 << 18, ge=1)
    max_active_per_client: int | None = Field(default=None, ge=1)
    kv_budget_mb: int | None = Field(default=None, ge=1)
    prefix_cache_mb: int | None = Field(default=None, ge=0)
    record_passes: Literal["auto", "on", "off"] = "auto"
    compile_layers: Literal["auto", "on", "off"] = "auto"
    exit_decisions: Literal["host", "device"] = "host"
    max_routers: int = Field(default=4, ge=1)
    stall_timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    metrics_listen: str = Field(default="", pattern=r"^$|^.+:[0-9]+$")
    router_cache_mb: int = Field(default=1024, ge=0)
    default_alias: str = Field(default="latest", pattern=r"^[a-z0-9._-]{1,64}$")
    shadow_share: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    relaxed_bound: float | None = Field(default=None, gt=0, lt=1, allow_inf_nan=False)


class CalibratorSettings(ServiceSettings):
    """`text_folders`: the only folders calibration text may be read from. `hub_datasets`: the only datasets of the Hugging Face Hub, as
    names or patterns ("owner/*"); "*": any public one, "none" or empty: none. `max_queued_jobs`: beyond it jobs are refused."""

    listen: str = Field(default="127.0.0.1:7070", validation_alias="NEAP_CALIBRATOR_LISTEN")
    health_listen: str = Field(default="", validation_alias="NEAP_CALIBRATOR_HEALTH_LISTEN")
    text_folders: Annotated[tuple[Path, ...], NoDecode] = ()
    hub_datasets: Annotated[tuple[str, ...], NoDecode] = ("*",)
    max_queued_jobs: int = Field(default=16, ge=1)

    @field_validator("text_folders", mode="before")
    @classmethod
    def _folders_from_text(cls, value: Any) -> Any:
        return _listed(value)

    @field_validator("hub_datasets", mode="before")
    @classmethod
    def _datasets_from_text(cls, value: Any) -> Any:
        patterns = list(_listed(value))
        if "none" not in patterns:
            return patterns
        if len(patterns) > 1:
            raise ValueError("none excludes other names of datasets")
        return ()


def settings_from_command_line(kind: type[S], program: str, argv: Sequence[str] | None = None) -> S:
    """Flags, then the environment, then defaults. Exits with a usage text for flags that do not parse.

    Raises InvalidInput (reason BAD_CONFIGURATION) for values that are out of range, and for a variable NEAP_.. that is none.
    """
    parser = argparse.ArgumentParser(prog=program, allow_abbrev=False)
    add = parser.add_argument
    add("--listen", metavar="HOST:PORT", help="address to listen on; port 0 picks a free one")
    add("--model", dest="models", action="append", metavar="ID=SOURCE", help="may be repeated")
    add(
        "--registry",
        metavar="URL",
        help="registry of routers: a folder, or redis://HOST/0?objects=s3://BUCKET/PREFIX",
    )
    add("--data-dir", metavar="FOLDER")
    add("--context-length", metavar="TOKENS", help="prompt and completion together, per sequence")
    add("--device", metavar="NAME", help="cpu or cuda")
    add("--dtype", choices=("auto", "float32", "float16", "bfloat16"))
    add("--threads", metavar="N", help="CPU threads for the model")
    add("--grace-s", metavar="SECONDS", help="keep accepting this long after SIGTERM")
    add("--drain-timeout-s", metavar="SECONDS", help="then let running calls finish this long")
    add("--log-level", choices=("debug", "info", "warning", "error"))
    add_security_flags(parser)
    if issubclass(kind, WorkerSettings):
        add("--max-running", metavar="N", help="requests of a model that share each step")
        add("--max-queue", metavar="N", help="requests waiting per model at most")
        add("--max-queue-tokens", metavar="N", help="tokens of their prompts at most")
        add("--max-active-per-client", metavar="N", help="requests of one caller at most")
        add("--kv-budget-mb", metavar="MIB", help="keys and values of all requests of a model")
        add("--prefix-cache-mb", metavar="MIB", help="of these, for prompts that start alike")
        add("--record-passes", choices=("auto", "on", "off"), help="as CUDA graphs")
        add("--compile-layers", choices=("auto", "on", "off"), help="by torch.compile, on a GPU")
        add("--exit-decisions", choices=("host", "device"), help="device: conditional CUDA graphs")
        add("--max-routers", metavar="N", help="routers kept in memory at most")
        add("--stall-timeout-s", metavar="SECONDS", help="end calls whose client does not read")
        add("--metrics-listen", metavar="HOST:PORT", help="metrics over HTTP; port 0 picks one")
        add("--router-cache-mb", metavar="MIB", help="routers of a shared registry on disk")
        add("--default-alias", metavar="ALIAS", help="router of requests that name none")
        add("--shadow-share", metavar="SHARE", help="of relaxed answers, checked in idle time")
        add("--relaxed-bound", metavar="SHARE", help="may differ, where routers say nothing")
    if issubclass(kind, CalibratorSettings):
        add(
            "--text-folder",
            dest="text_folders",
            action="append",
            metavar="FOLDER",
            help="folder text may be read from; may be repeated",
        )
        add(
            "--hub-dataset",
            dest="hub_datasets",
            action="append",
            metavar="PATTERN",
            help="Hub dataset text may be read from, e.g. owner/*, or none; may be repeated",
        )
        add("--max-queued-jobs", metavar="N")
    given = {
        name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None
    }
    if problems := unknown_variables():
        raise InvalidInput("; ".join(problems), reason="BAD_CONFIGURATION")
    return make_settings(kind, **given)


def known_variables() -> frozenset[str]:
    """Every variable NEAP_.. that a service, a client, the build or a test reads."""
    names = set(_OTHER_VARIABLES)
    for kind in (WorkerSettings, CalibratorSettings, ClientSettings):
        for name, field in kind.model_fields.items():
            alias: Any = field.validation_alias or kind.model_config["env_prefix"] + name
            names |= {str(choice) for choice in getattr(alias, "choices", [alias])}
    return frozenset(name.upper() for name in names if name.upper().startswith(PREFIX))


def unknown_variables(environment: Iterable[str] | None = None) -> list[str]:
    """A sentence for each NEAP_.. in the environment that nothing reads, with the nearest name there is. Values are never shown."""
    known = known_variables()
    problems = []
    for name in sorted(os.environ if environment is None else environment):
        upper = name.upper()
        if not upper.startswith(PREFIX) or upper in known or _SERVICE_LINK.fullmatch(upper):
            continue
        ends = sorted(other.removeprefix(PREFIX) for other in known)
        near = difflib.get_close_matches(upper.removeprefix(PREFIX), ends, n=1)
        hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
        problems.append(f"the variable {name} is not known{hint}")
    return problems


def make_settings(kind: type[B], **given: Any) -> B:
    """`kind` from keyword values over the environment. Raises InvalidInput (reason BAD_CONFIGURATION)."""
    try:
        return kind(**given)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'settings'}: {problem['msg']}"
            for problem in error.errors()
        )
        raise InvalidInput(problems, reason="BAD_CONFIGURATION") from error
