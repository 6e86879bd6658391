"""Settings of the two services. `shared.config` explains where the values come from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from platformdirs import user_data_path
from pydantic import Field, StringConstraints, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from shared.pool_names import POOL_PATTERN
from shared.process_settings import METRICS_LISTEN, METRICS_LISTEN_PATTERN, Listed, ProcessSettings, listed
from shared.security_settings import HEALTH_LISTEN, OptionalFile, SecuritySettings

Alias = Annotated[str, StringConstraints(pattern=r"^[a-z0-9._-]{1,64}$")]
PoolAlias = Annotated[str, StringConstraints(pattern=rf"^[a-z0-9._-]{{1,64}}(@{POOL_PATTERN})?$")]
PoolShare = Annotated[str, StringConstraints(pattern=rf"^({POOL_PATTERN}|\*)=(0|1|0?\.[0-9]{{1,6}}|1\.0)$")]
RolePriority = Annotated[str, StringConstraints(pattern=r"^(generate|calibrate|admin)=(0|-?[1-9][0-9]?|-?100)$")]


@dataclass(frozen=True)
class ModelSource:
    """The id of a model and its source: a Hugging Face folder, a .gguf file, or a hub name."""

    model_id: str
    source: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse "id=source". Raises ValueError."""
        model_id, equals, source = text.partition("=")
        if not (equals and model_id.strip() and source.strip()):
            raise ValueError(f"model is {text!r}; it must be ID=SOURCE")
        return cls(model_id.strip(), source.strip())


class ServiceSettings(ProcessSettings, SecuritySettings):
    """Settings of both services."""

    model_config = SettingsConfigDict(env_prefix="NEAP_", frozen=True, extra="forbid", populate_by_name=True)

    models: Annotated[tuple[ModelSource, ...], NoDecode] = Field(
        default=(),
        description="A model and its source: a Hugging Face folder, a .gguf file, or a name on the Hugging Face Hub. "
        "Clients use the ID. May be repeated; the variable takes a comma-separated list.",
        json_schema_extra={"metavar": "ID=SOURCE"},
    )
    data_dir: Path = Field(
        default_factory=lambda: user_data_path("neap"),
        description="Folder for jobs, caches and, unless another registry is set, the registry. Unset: the user's data "
        "folder of the platform, on Linux ~/.local/share/neap.",
        json_schema_extra={"metavar": "FOLDER"},
    )
    registry: str = Field(
        default="",
        repr=False,
        description="Registry of routers: a folder, file:///PATH, or for several machines s3://BUCKET/PREFIX or "
        "redis://HOST/0?objects=s3://BUCKET/PREFIX. Give a URL with a password as a variable, because flags are "
        "visible in process lists. Unset: the folder registry below the data folder.",
        json_schema_extra={"metavar": "URL"},
    )
    require_signatures: Listed[Path] = Field(
        default=(),
        description="PEM file with a public key, or with certificates of authorities, whose signature every router "
        "must have: workers load no other, and the calibration service points no alias at another. May be repeated, "
        "and one of the files is enough; the variable takes a comma-separated list. Unset: no signature is needed.",
        json_schema_extra={"metavar": "FILE"},
    )
    traffic_key: OptionalFile = Field(
        default=None,
        description="File with 64 hexadecimal digits (openssl rand -hex 32): answers that are kept to learn from are "
        "encrypted with this key, and no others are read. Unset: they are not encrypted by neap.",
    )
    traffic_days: float = Field(
        default=7.0,
        gt=0,
        allow_inf_nan=False,
        description="Days after which answers that are kept to learn from are removed.",
    )
    context_length: int | None = Field(
        default=None,
        ge=2,
        description="Most tokens of prompt and answer together, per sequence; at most the model's own limit. Unset: "
        "the model's own limit.",
        json_schema_extra={"metavar": "TOKENS"},
    )
    device: str = Field(
        default="cpu", description="Device that runs the models: cpu or cuda.", json_schema_extra={"metavar": "NAME"}
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        default="auto",
        description="Format in which weights are kept. auto: the checkpoint's own, which is the data type or the "
        "blocks of a .gguf file. A CPU computes in float32 whatever the format; other devices compute in it, and in "
        "bfloat16 for the blocks of a .gguf file.",
    )
    compute_dtype: Literal["auto", "float32", "bfloat16", "int8"] = Field(
        default="auto",
        description="Format in which a CPU multiplies. auto: int8 for the quantised weights of a .gguf file, float32 "
        "for all others. int8: quantised weights are multiplied by inputs rounded to 8 bits, as llama.cpp does; other "
        "models are refused. bfloat16: weights kept in bfloat16 are multiplied by inputs rounded to it, as Hugging "
        "Face does for such a model. With AVX-512 BF16, prompts and large batches then take little more than half the "
        "time. A model without weights in bfloat16 is refused; --dtype bfloat16 rounds them. exact gives the tokens of "
        "full in every format, but both may differ from those of float32. Bounds of relaxed hold for workers with the "
        "format of the calibration.",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU threads that run the models; as a variable, also the threads of each library's pool. Unset: "
        "as many CPUs as the process may use, by its affinity and its container's CPU quota.",
    )
    max_connection_age_s: float | None = Field(
        default=300.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds after which a client is told to open a new connection, plus or minus a tenth. It then "
        "resolves the service's name again, so that new replicas get their share of calls. Running calls finish on the "
        "old connection.",
    )
    max_connection_age_grace_s: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Seconds that calls may still run on a connection that has reached its age; those that run longer "
        "are cut off. Unset: no limit.",
    )

    @property
    def sources(self) -> dict[str, ModelSource]:
        """The models by their ids."""
        return {model.model_id: model for model in self.models}

    @field_validator("models", mode="before")
    @classmethod
    def _models_from_text(cls, value: Any) -> Any:
        parts = listed(value)
        return tuple(ModelSource.parse(part) if isinstance(part, str) else part for part in parts)

    @model_validator(mode="after")
    def _resolved(self) -> Self:
        ids = [model.model_id for model in self.models]
        if len(ids) != len(set(ids)):
            raise ValueError("two models have the same id")
        if not self.registry:
            # The class is frozen, so its own __setattr__ cannot be used here.
            object.__setattr__(self, "registry", str(self.data_dir / "registry"))
        return self


class WorkerSettings(ServiceSettings):
    """Settings of the inference worker."""

    listen: str = Field(
        default="127.0.0.1:7071",
        validation_alias="NEAP_WORKER_LISTEN",
        description="Address to listen on for gRPC. Port 0 picks a free port.",
    )
    health_listen: str = Field(default="", validation_alias="NEAP_WORKER_HEALTH_LISTEN", description=HEALTH_LISTEN)
    max_running: int | None = Field(
        default=None,
        ge=1,
        description="Most requests of a model that share each step. Unset: 16, and on a GPU as many as there are keys "
        "and values for, of 2048 tokens each, up to 256.",
    )
    max_queue: int = Field(
        default=64, ge=1, description="Most requests that wait, per model. Further requests are refused (QUEUE_FULL)."
    )
    max_queue_tokens: int = Field(
        default=1 << 18,
        ge=1,
        description="Most prompt tokens of all waiting requests together, per model. Further requests are refused.",
    )
    max_active_per_client: int | None = Field(
        default=None,
        ge=1,
        description="Most waiting and running requests of one caller, per model. Callers are told apart by name if "
        "tokens or client certificates are used, otherwise by address. Unset: as many as the caller leaves free for "
        "others of --max-queue and --max-running together, so half if there is no other.",
    )
    kv_budget_mb: int | None = Field(
        default=None,
        ge=1,
        description="MiB for the keys and values of all requests, per model. Unset: half of the memory that is free "
        "once the model is loaded; for a single model on a GPU what --gpu-memory-share leaves.",
    )
    gpu_memory_share: float = Field(
        default=0.9,
        ge=0.05,
        le=0.98,
        description="Share of a GPU's memory that a worker with a single model takes, for weights, keys and values, "
        "with what other processes have taken before. Less leaves room for those that come later, such as a "
        "calibration service on the same GPU; the rest is for graphs and routers. --kv-budget-mb goes before it.",
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Processes that share the weights of the worker's one model, each on a card of its own, or with "
        "its part of a CPU's threads. The worker starts the others beside it, or takes its place among those that "
        "torchrun has started. Families without a tensor-parallel plan, quantised checkpoints and .gguf files are "
        "refused.",
        json_schema_extra={"metavar": "RANKS"},
    )
    rank_timeout_s: float = Field(
        default=600.0,
        gt=0,
        allow_inf_nan=False,
        description="With --tensor-parallel: seconds for which ranks wait for each other until the model is loaded. "
        "Afterwards a rank that takes --hang-timeout-s for its part of a pass counts as hung.",
    )
    kv_dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        default="auto",
        description="Format in which keys and values are kept. auto: the one that the device computes in, which is "
        "float32 on a CPU. A 16-bit format halves their memory and their share of each step; they are rounded once, so "
        "exact still gives the tokens of full, but both may differ from those of float32. float16 holds no number "
        "above 65504. Formats other than auto's need neap's attention on a CPU; a model that runs another is refused "
        "at start.",
    )
    cpu_path: Literal["auto", "avx512bf16", "avx512", "avx2", "portable", "i8mm", "dotprod", "neon"] = Field(
        default="auto",
        description="Instruction set of neap's CPU kernels. auto: the widest that the processor has. Their results "
        "differ in the last bits, so workers on machines of several kinds give the same answers only if all of them "
        "are set to a path that every machine has. The worker does not start on a machine without it.",
    )
    prefix_cache_mb: int | None = Field(
        default=None,
        ge=0,
        description="MiB of the KV budget kept for reuse by later requests with the same prefix. 0 switches all "
        "sharing of prefixes off. Unset: a quarter of the KV budget.",
    )
    prefix_cache_scope: Literal["pool", "all"] = Field(
        default="pool",
        description="Callers whose requests share cached prefixes. pool: of one pool. all: everybody, so how soon an "
        "answer begins tells whether somebody has sent the same beginning before.",
    )
    learn: Listed[PoolShare] = Field(
        default=(),
        description="Keep a share, in [0, 1], of the answers of a pool to learn a router from, as token ids below "
        "traffic/ in the registry; docs/privacy.md says what is kept. The pool of callers whose token names none is "
        "default; * stands for all pools that are not named. May be repeated; the variable takes a comma-separated "
        "list. Unset: nothing is kept.",
        json_schema_extra={"metavar": "POOL=SHARE"},
    )
    learned_table_mb: int = Field(
        default=0,
        ge=0,
        description="MiB for a table that learns from the answers of policy exact and drafts later ones, per model. It "
        "pays where a caller's answers are alike (16 are plenty), and costs a small model some speed elsewhere. A "
        "caller's answers draft for the same caller only; callers are told apart as for max_active_per_client. 0: "
        "nothing is learned from answers.",
    )
    record_passes: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Replay passes as CUDA graphs. auto: on a GPU, if the recording works. on: the worker does not "
        "start if it fails.",
    )
    compile_layers: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Compile decoder layers with torch.compile. auto: on a GPU, if compiling works. on: the worker "
        "does not start if it fails.",
    )
    require_exact: bool = Field(
        default=False,
        description="Start only if policy exact gives the tokens of full for every model, whatever runs beside a "
        "request. Otherwise the worker serves such a model, says so in its log, in Started and in GetModel, and exact "
        "may differ from full where the model's two best choices are nearly equal. On a GPU products and norms are "
        "then neap's own, which takes longer than the vendor's; for .gguf files they always are.",
    )
    router_memory_mb: int | None = Field(
        default=None,
        ge=1,
        description="MiB of memory, per model, for routers that are ready, beside one that is made ready; on a GPU its "
        "memory. What several have in common counts once. The least recently used one that no request uses is dropped "
        "first, that of the default alias last; one that alone is larger is refused (ROUTER_OVER_MEMORY). Unset: a "
        "quarter of what the model and the KV budget leave free, and at least 256; the log says how much.",
    )
    stall_timeout_s: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds for which a client may stop reading its stream. The call then ends with "
        "RESOURCE_EXHAUSTED (SLOW_READER).",
    )
    priority_of_roles: Listed[RolePriority] = Field(
        default=(),
        description="Priority, in [-100, 100], of the requests of callers with a role; lower numbers come first. A "
        "caller with several roles has the lowest of theirs, and may ask for higher numbers. Other roles have 0. May "
        "be repeated; the variable takes a comma-separated list.",
        json_schema_extra={"metavar": "ROLE=NUMBER"},
    )
    chat_control_tokens: bool = Field(
        default=False,
        description="Control tokens, such as <|im_end|>, in the messages and tools of a chat have the effect that they "
        "have in the chat template, so whoever writes a part of a message can begin turns of other roles. Otherwise "
        "they are read as the text that they are.",
    )
    vllm_dialect: bool = Field(
        default=False,
        description="Serve vllm.grpc.engine.VllmEngine, too, for gateways that speak it (docs/gateways.md). Needs "
        "exactly one model, and an extra: pip install 'neap-server[smg]'.",
    )
    hang_timeout_s: float = Field(
        default=300.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds after which a step that has not ended counts as hung, because of a device or a driver. "
        "The worker then logs where it hangs and exits with status 1, so that it is restarted.",
    )
    metrics_listen: str = Field(default="", pattern=METRICS_LISTEN_PATTERN, description=METRICS_LISTEN)
    router_cache_mb: int = Field(
        default=1024,
        ge=0,
        description="MiB on disk, below the data folder, for routers fetched from a registry in a bucket. 0 keeps "
        "none.",
    )
    start_cache_mb: int = Field(
        default=16384,
        ge=0,
        description="MiB on disk, in the folder start-cache below the data folder, for what a start of this worker "
        "remembers for the next one: packed weights, which take as much as the model's file, and what was proven and "
        "measured. It counts for the same model, build and machine only, and is made anew if it is damaged. On a "
        "GPU it is the limit of the folder compile-cache beside it, for what torch.compile, Triton and the driver have "
        "compiled. 0 keeps nothing.",
    )
    routers: Listed[str] = Field(
        default=(),
        description="Router to import into the registry at start: hf://OWNER/NAME@REVISION, oci://HOST/REPOSITORY:TAG "
        "or a folder. The default alias of the model with its weights is pointed at it when it is published first; "
        "later starts move nothing. May be repeated; the variable takes a comma-separated list.",
        json_schema_extra={"metavar": "URL"},
    )
    default_alias: Alias = Field(default="latest", description="Alias of the router for requests that name none.")
    preload_aliases: Listed[PoolAlias] = Field(
        default=(),
        description="An alias whose router is loaded before the worker is ready, besides the default alias. May be "
        "repeated; the variable takes a comma-separated list. Unset: all aliases, the newest versions first, as far as "
        "router_memory_mb allows.",
        json_schema_extra={"metavar": "ALIAS"},
    )
    report_to: Listed[str] = Field(
        default=(),
        description="Address of the calibration service that judges router versions: HOST:PORT or any other form that "
        "gRPC accepts. Every report_interval_s it gets sums over finished answers, without their text; requests do not "
        "depend on it. The variables NEAP_CLIENT_* and NEAP_TOKEN say how to connect; the token needs the role "
        "calibrate. May be repeated: of several services the one that answers is used. The variable takes a "
        "comma-separated list. Unset: nothing is reported.",
        json_schema_extra={"metavar": "ADDRESS"},
    )
    report_interval_s: float = Field(
        default=10.0,
        ge=0.1,
        le=3600.0,
        description="Seconds between two reports. A trial of a version takes as many intervals as comparisons, at "
        "least.",
    )
    preload_timeout_s: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Seconds after which a worker that starts is ready although the registry does not answer. It then "
        "serves policy full. Unset: it waits for the registry.",
    )


class CalibratorSettings(ServiceSettings):
    """Settings of the calibration service."""

    listen: str = Field(
        default="127.0.0.1:7070",
        validation_alias="NEAP_CALIBRATOR_LISTEN",
        description="Address to listen on for gRPC. Port 0 picks a free port.",
    )
    health_listen: str = Field(default="", validation_alias="NEAP_CALIBRATOR_HEALTH_LISTEN", description=HEALTH_LISTEN)
    text_folders: Listed[Path] = Field(
        default=(),
        description="Folder from which a calibration may read text files. May be repeated; the variable takes a "
        "comma-separated list. Unset: no file may be read.",
        json_schema_extra={"metavar": "FOLDER"},
    )
    hub_datasets: Annotated[tuple[str, ...], NoDecode] = Field(
        default=("*",),
        description="Dataset of the Hugging Face Hub that a calibration may read: a name or a pattern such as owner/*. "
        "* allows any public dataset; none, or an empty variable, forbids all datasets. May be repeated; the variable "
        "takes a comma-separated list.",
        json_schema_extra={"metavar": "PATTERN"},
    )
    text_workers: Listed[str] = Field(
        default=(),
        description="Address of inference workers that may write a calibration's text, at low priority, if its request "
        "asks for that: HOST:PORT or any other form that gRPC accepts. Requests cannot name addresses. The variables "
        "NEAP_CLIENT_* and NEAP_TOKEN say how to connect. May be repeated; the variable takes a comma-separated list. "
        "Unset: the service writes all text itself.",
        json_schema_extra={"metavar": "ADDRESS"},
    )
    judge: Literal["off", "asked", "publications"] = Field(
        default="off",
        description="Judge router versions by what workers report (--report-to of a worker). asked: versions that an "
        "operator puts on trial (neap routers try), and those that serve. publications: also what calibrations "
        "publish: an alias that exists is not moved, but gets the version as a canary, which is promoted once it is "
        "found to be faster. One of several services of a registry judges.",
    )
    max_queued_jobs: int = Field(
        default=16, ge=1, description="Most jobs that wait to be run. Further jobs are refused."
    )
    job_retention_days: float = Field(
        default=30.0,
        gt=0,
        description="Days after its end for which a job's record and log are kept; inf keeps them for ever. A job "
        "whose router is not published yet has not ended. Once a record is removed, its request id starts a new job.",
    )
    metrics_listen: str = Field(
        default="",
        pattern=METRICS_LISTEN_PATTERN,
        validation_alias="NEAP_CALIBRATOR_METRICS_LISTEN",
        description=METRICS_LISTEN,
    )
    learn_from_traffic: bool = Field(
        default=False,
        description="Learn from what workers keep of the answers that they serve (their --learn): per pool a job that "
        "goes on from the pool's router, again and again. One of several services with one registry does it.",
    )
    learn_tokens: int = Field(
        default=20_000,
        ge=1,
        description="With --learn-from-traffic: new tokens of a pool, prompts included, that begin a job.",
    )
    learn_interval_s: float = Field(
        default=1800.0,
        ge=0,
        description="With --learn-from-traffic: least seconds between the beginnings of two jobs of a pool.",
    )
    learn_budget_s: float = Field(
        default=150.0, gt=0, le=604_800, description="With --learn-from-traffic: seconds that such a job may take."
    )
    rank_timeout_s: float = Field(
        default=600.0,
        gt=0,
        le=86_400,
        description="Longest seconds for which a rank of a calibration by many processes waits for the others. Then "
        "the job is resumed from its files, as after a rank has died.",
    )
    max_time_budget_s: float = Field(
        default=604_800.0,
        gt=0,
        le=315_576_000_000,
        description="Longest duration in seconds that a job may ask for. Jobs that ask for more are refused. The "
        "default is a week.",
    )

    @field_validator("hub_datasets", mode="before")
    @classmethod
    def _datasets_from_text(cls, value: Any) -> Any:
        patterns = list(listed(value))
        if "none" in patterns and len(patterns) > 1:
            raise ValueError("none cannot be combined with names of datasets")
        return [] if "none" in patterns else patterns

    @model_validator(mode="after")
    def _learns_with_a_model(self) -> Self:
        if self.learn_from_traffic and not self.models:
            raise ValueError("to learn from traffic the service needs a model")
        return self
