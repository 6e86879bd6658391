"""Settings of the inference worker."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from shared.pool_names import POOL_PATTERN
from shared.process_settings import METRICS_LISTEN, METRICS_LISTEN_PATTERN, Listed
from shared.security_settings import HEALTH_LISTEN
from shared.service_settings import ServiceSettings

Alias = Annotated[str, StringConstraints(pattern=r"^[a-z0-9._-]{1,64}$")]
PoolAlias = Annotated[str, StringConstraints(pattern=rf"^[a-z0-9._-]{{1,64}}(@{POOL_PATTERN})?$")]
PoolShare = Annotated[str, StringConstraints(pattern=rf"^({POOL_PATTERN}|\*)=(0|1|0?\.[0-9]{{1,6}}|1\.0)$")]
RolePriority = Annotated[str, StringConstraints(pattern=r"^(generate|calibrate|admin)=(0|-?[1-9][0-9]?|-?100)$")]


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
    cpu_path: Literal["auto", "amx", "avx512bf16", "avx512", "avx2", "portable", "i8mm", "dotprod", "neon"] = Field(
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
