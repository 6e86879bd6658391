"""The table of reasons: how a client provokes each over gRPC, HTTP and the command line, and which tests provoke what
no request can. test_reasons.py goes through it.

What a face says beside the reason, and what a test of logic needs, is in the tests of that place.
"""

from typing import Any, NamedTuple

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from grpc import StatusCode
from grpc_health.v1.health_pb2 import HealthCheckRequest
from neap_client.calibration.v1 import calibration_pb2 as jobs
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.router.v1 import router_pb2 as router

from tests.worker import CONTEXT_LENGTH

INVALID, MISSING, NOT_NOW = StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND, StatusCode.FAILED_PRECONDITION
UNKNOWN, DENIED = StatusCode.UNAUTHENTICATED, StatusCode.PERMISSION_DENIED
FULL, CHANGED = StatusCode.RESOURCE_EXHAUSTED, StatusCode.ABORTED
LONG = "x" * (CONTEXT_LENGTH + 1)
OUTSIDE, TEXT = 2**32 - 1, "x" * 300
MANY = pb.TokenIds(ids=[97] * CONTEXT_LENGTH)
USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "go"}}


class Row(NamedTuple):
    """`says`: a part of the message. None: that face has no such field, or refuses it by itself.

    `request`: changes of a Generate request, or a request of any RPC. `body`: fields of a completion, of a chat if it
    has messages, or a method, a path and a content. `flags`: a command, or what follows `generate hello`.
    `token`: the caller's."""

    reason: str
    says: str
    request: dict[str, Any] | Message | None
    body: dict[str, Any] | tuple[str, str, str] | None = None
    flags: str | None = None
    token: str | None = "all"


def asked(reason: str, says: str, request: Message, flags: str | None = None, token: str = "all") -> Row:
    """Of the calibrator, which HTTP does not reach."""
    return Row(reason, says, request, None, flags, token)


def sampled(**fields: Any) -> Row:
    """A number of Sampling outside its limits."""
    ((name, value),) = fields.items()
    flag = f"--{name.replace('_', '-')} {value}"
    return Row("INVALID_INPUT", name, {"sampling": pb.Sampling(**fields)}, fields, flag)


def relaxed(**fields: Any) -> dict[str, Any]:
    return {"depth": pb.DepthPolicy(relaxed=pb.Relaxed(**fields))}


def exact_with(**fields: Any) -> dict[str, Any]:
    return {"depth": pb.DepthPolicy(), "router": pb.RouterSelector(**fields)}


def chat(*messages: pb.ChatMessage, **fields: Any) -> dict[str, Any]:
    return {"chat": pb.Chat(messages=messages, **fields)}


def resumed(**fields: Any) -> dict[str, Any]:
    return {"resume": pb.Resume(**fields), "stopping": pb.Stopping(max_tokens=8, ignore_eos=True)}


def job(request_id: str = "second", **spec: Any) -> Message:
    """A request for a calibration of "tiny" from its own text."""
    spec = {"self_generated": jobs.SelfGenerated()} | {"model_id": "tiny"} | spec
    if {"text_file", "answer_file", "hub_dataset"} & spec.keys():
        del spec["self_generated"]
    return jobs.CreateCalibrationRequest(request_id=request_id, spec=jobs.CalibrationSpec(**spec))


def going_on(**parent: Any) -> Message:
    return job(model_id="acme", parent=jobs.ParentRouter(**parent))


def dataset(**fields: Any) -> Message:
    return job(hub_dataset=jobs.HubDataset(**fields))


def text_file(path: str, **fields: Any) -> Message:
    return job(text_file=jobs.TextFile(path=path, **fields))


def lasting(**budget: Any) -> Row:
    return Row("BAD_SPEC", "spec.time_budget", job(time_budget=Duration(**budget)))


def move(alias: str = "stable", version: int = 2, **fields: Any) -> Message:
    return router.SetAliasRequest(model_id="acme", alias=alias, version=version, **fields)


def version_of(model_id: str = "acme", **selector: Any) -> Message:
    return router.GetVersionRequest(model_id=model_id, **selector)


NOBODY, DIGEST, OWN = {"model_id": "nobody"}, f"sha256:{'0' * 64}", jobs.SelfGenerated

# (gRPC status, HTTP status) -> rows. The command line exits with 1.
ROWS: dict[tuple[StatusCode, int], list[Row]] = {
    (INVALID, 400): [
        # what is generated
        Row("EMPTY_PROMPT", "empty", {"text": ""}, {"prompt": [[]]}, "generate --raw ''"),
        Row("EMPTY_PROMPT", "empty", {"token_ids": None}),
        Row("EMPTY_PROMPT", "", chat()),
        Row("PROMPT_TOO_LONG", str(CONTEXT_LENGTH), {"text": LONG}, {"prompt": LONG}, f"generate --raw {LONG}"),
        Row("PROMPT_TOO_LONG", "tokens", {"token_ids": MANY}, {"prompt": list(MANY.ids)}),
        Row("PROMPT_TOO_LONG", str(CONTEXT_LENGTH), {"text": "x" * 10_000_000}),
        Row("PROMPT_TOO_LONG", "", chat(*[pb.ChatMessage(role="user")] * CONTEXT_LENGTH)),
        Row("PREDICTION_TOO_LONG", "", {"prediction": pb.Prediction(text=LONG * 64)}, None,
            "--prediction {folder}/long"),
        Row("PREDICTION_TOO_LONG", "", {"prediction": pb.Prediction(token_ids=pb.TokenIds(ids=[97, *MANY.ids]))}),
        Row("MAX_TOKENS_TOO_LARGE", "", {"stopping": pb.Stopping(max_tokens=CONTEXT_LENGTH)},
            {"max_tokens": CONTEXT_LENGTH}, f"--max-tokens {CONTEXT_LENGTH}"),
        Row("TOKEN_OUT_OF_RANGE", "", {"token_ids": pb.TokenIds(ids=[OUTSIDE])}, {"prompt": [OUTSIDE]}),
        Row("TOKEN_OUT_OF_RANGE", "", {"stopping": pb.Stopping(stop_token_ids=[OUTSIDE])},
            {"stop_token_ids": [OUTSIDE]}, f"--stop-token-ids {OUTSIDE}"),
        Row("TOKEN_OUT_OF_RANGE", "", {"sampling": pb.Sampling(logit_bias={OUTSIDE: 1.0})},
            {"logit_bias": {str(OUTSIDE): 1.0}}, f"--logit-bias {OUTSIDE}=1"),
        Row("TOKEN_OUT_OF_RANGE", "", {"prediction": pb.Prediction(token_ids=pb.TokenIds(ids=[OUTSIDE]))}),
        Row("TOKEN_OUT_OF_RANGE", "", resumed(token_ids=[OUTSIDE])),
        Row("RESUMED_TOO_LONG", "", resumed(token_ids=[5] * 9)),
        Row("RESUMED_TOO_LONG", "", resumed(token_ids=[5] * 100_000)),
        Row("RESUMED_BEYOND_END", "", {"resume": pb.Resume(token_ids=[256, 97])}),
        Row("INVALID_INPUT", "min_layers", {"depth": pb.DepthPolicy(min_layers=99)}, {"neap": {"min_layers": 99}},
            "--min-layers 99"),
        sampled(temperature=-0.5), sampled(top_p=1.5), sampled(min_p=2.0), sampled(repetition_penalty=0.001),
        sampled(presence_penalty=2.5),
        Row("INVALID_INPUT", "logprobs", {"logprobs": 21}, {"logprobs": 21}),
        Row("BAD_POOL", "../x", {"pool": "../x"}, None, "--pool ../x"),
        Row("BAD_ALIAS", "a b", exact_with(alias="a b"), {"neap": {"router_alias": "a b"}}, "--router 'a b'"),
        Row("MARGIN_NEEDS_GREEDY", "greedy", relaxed(margin=1.0) | {"sampling": pb.Sampling(temperature=1.0)},
            {"neap": {"policy": "relaxed", "margin": 1.0}, "temperature": 1.0},
            "--policy relaxed --margin 1 --temperature 1"),
        Row("CONSTRAINT_INVALID", "", {"constraint": pb.Constraint(regex="(")}, {"structured_outputs": {"regex": "("}},
            "--json-schema {folder}/long"),
        Row("CONSTRAINT_TOO_COMPLEX", "", {"constraint": pb.Constraint(regex="((a{100}){100}){100}")},
            {"structured_outputs": {"regex": "((a{100}){100}){100}"}}),
        Row("CONSTRAINT_BROKEN", "", resumed(token_ids=[97]) | {
            "constraint": pb.Constraint(regex="b"), "stopping": pb.Stopping(max_tokens=8)}),
        Row("INVALID_INPUT", "ignore_eos", {
            "constraint": pb.Constraint(regex="b"), "stopping": pb.Stopping(ignore_eos=True)}),
        Row("UNKNOWN_ROLE", "poet", chat(pb.ChatMessage(role="poet", content="x"))),
        Row("TOOLS_NOT_SUPPORTED", "chat template", chat(pb.ChatMessage(role="user"), tools=[pb.Tool(name="go")]),
            {"messages": [USER], "tools": [TOOL]}),
        # what only the gateway refuses
        Row("UNKNOWN_FIELD", "temprature", None, {"temprature": 1}),
        Row("UNSUPPORTED_FIELD", "suffix", None, {"suffix": "x"}),
        Row("TOO_MANY_CHOICES", "5", None, {"prompt": ["x"] * 5}),
        Row("BAD_JSON", "", None, ("POST", "/v1/completions", "{")),
        # what is calibrated
        asked("MODEL_REQUIRED", "acme, tiny", job(model_id=""), "calibrate --model ''"),
        asked("BAD_MODEL_ID", "../tiny", job(model_id="../tiny"), "calibrate --model ../tiny"),
        asked("BAD_MODEL_ID", "../x", version_of("../x", version=1), "routers show 1 --model ../x"),
        asked("BAD_MODEL_ID", "../x", router.WatchRequest(model_id="../x")),
        asked("BAD_ALIAS", "No Way", job(aliases=["No Way"]), "calibrate --alias 'No Way'"),
        asked("BAD_ALIAS", "a/b", move(alias="a/b"), "routers promote 1 --alias a/b"),
        asked("BAD_ALIAS", "", going_on()),
        asked("BAD_REQUEST_ID", "", job("")),
        asked("BAD_REQUEST_ID", "128", job("x" * 129), f"calibrate --request-id {'x' * 129}"),
        asked("SOURCE_REQUIRED", "self_generated", jobs.CreateCalibrationRequest(
            request_id="x", spec=jobs.CalibrationSpec(model_id="tiny"))),
        asked("BAD_SPEC", "no spec", jobs.CreateCalibrationRequest(request_id="x")),
        asked("BAD_SPEC", "16", job(aliases=["latest"] * 17), f"calibrate {'--alias latest ' * 17}"),
        asked("BAD_SPEC", "77", job(label=77)),
        lasting(seconds=0), lasting(seconds=-5), lasting(seconds=2**63 - 1), lasting(nanos=10**9),
        lasting(seconds=5, nanos=-1),
        asked("BAD_SPEC", "spec.time_budget", job(time_budget=Duration(seconds=604_801)),
            "calibrate --time-budget 604801"),
        asked("BAD_SPEC", "", going_on(version=-1)),
        asked("BAD_SPEC", "", going_on(version=1, share=0.0)),
        asked("BAD_SPEC", "", going_on(version=1, share=1.01)),
        asked("BAD_SPEC", "", going_on(version=1, share=float("nan"))),
        asked("BAD_SPEC", "digest", going_on(version=1, manifest_digest="sha256:1")),
        asked("BAD_SPEC", "control", dataset(name="a\x1b[2J")),
        asked("SPEC_TOO_LARGE", "bytes", job(self_generated=OWN(prompts=["x" * 1_000_000] * 9))),
        asked("SPEC_TOO_LARGE", "prompts", job(self_generated=OWN(prompts=["x"] * 100_001)),
            "calibrate --prompts {folder}/prompts"),
        asked("BAD_TEXT_FILE", "1000", text_file("a", field="x" * 1001), f"calibrate --text a --field {'x' * 1001}"),
        asked("BAD_TEXT_FILE", "U+2028", job(answer_file=jobs.AnswerFile(path="a\u2028.jsonl"))),
        asked("BAD_TEXT_FILE", "valid path", text_file(f"{'x' * 900}.txt")),
        asked("BAD_TEXT_FILE", "neither", text_file("data.bin")),
        asked("PATH_NOT_ALLOWED", "folder", text_file("/etc/passwd"), "calibrate --text /etc/passwd"),
        asked("BAD_DATASET_NAME", "./data", dataset(name="./data"), "calibrate --dataset ./data"),
        asked("DATASET_NOT_ALLOWED", "o/set", dataset(name="o/set"), "calibrate --dataset o/set"),
        asked("BAD_DATASET_SPLIT", "slices", dataset(name="g/a", split="a-b"), "calibrate --dataset g/a::a-b"),
        asked("BAD_DATASET_CONFIG", "256", dataset(name="g/a", config=TEXT), f"calibrate --dataset g/a:{TEXT}"),
        asked("BAD_DATASET_FIELD", "256", dataset(name="g/a", field=TEXT), f"calibrate --dataset g/a --field {TEXT}"),
        # which routers serve
        asked("BAD_SELECTOR", "", version_of()),
        asked("BAD_PAGE_TOKEN", "", router.ListVersionsRequest(model_id="acme", page_token="-1")),
        asked("BAD_PAGE_TOKEN", "", jobs.ListCalibrationsRequest(page_token="'; --")),
        Row("BAD_PAGE_TOKEN", "", pb.ListModelsRequest(page_token="x")),
        asked("BAD_PAGE_SIZE", "-1", jobs.ListCalibrationsRequest(page_size=-1)),
        asked("BAD_EVENT", "after_event", router.WatchRequest(model_id="acme", after_event=-1)),
        asked("NOTE_TOO_LONG", "2000", move(reason="x" * 2001), f"routers promote 2 --reason {'x' * 2001}"),
        asked("BAD_NOTE", "U+001B", move(reason="\x1b[2J"), "routers promote 2 --reason '\x1b[2J'"),
        asked("BAD_CANARY", "already", router.SetCanaryRequest(
            model_id="acme", alias="stable", canary=router.Canary(version=1, share_per_mille=5)),
            "routers canary 1 --share 1%"),
        asked("BAD_SHARE", "0 per mille", router.SetCanaryRequest(
            model_id="acme", alias="stable", canary=router.Canary(version=2))),
        asked("BAD_ORDER", "", router.OrderJudgeRequest(model_id="acme")),
        asked("INVALID_INPUT", "expected_version", move(expected_version=-1), "routers promote 2 --expect -1"),
    ],
    (MISSING, 404): [
        Row("MODEL_NOT_FOUND", "tiny", NOBODY, {"model": "nobody"}, "--model nobody"),
        Row("MODEL_NOT_FOUND", "tiny", pb.GetModelRequest(**NOBODY), ("GET", "/v1/models/nobody", "")),
        asked("MODEL_NOT_FOUND", "acme, tiny", job(**NOBODY), "calibrate --model nobody"),
        Row("ALIAS_NOT_FOUND", "next", exact_with(alias="next"), {"neap": {"router_alias": "next"}}, "--router next"),
        asked("ALIAS_NOT_FOUND", "next", version_of(alias="next"), "routers show next"),
        asked("ALIAS_NOT_FOUND", "next", going_on(alias="next"), "calibrate --model acme --from next"),
        asked("ALIAS_NOT_FOUND", "a", router.GetAliasHistoryRequest(model_id="acme", alias="a"),
            "routers history --alias a"),
        Row("ROUTER_VERSION_NOT_FOUND", "7", exact_with(version=7), {"neap": {"router_version": 7}}, "--router 7"),
        asked("ROUTER_VERSION_NOT_FOUND", "9", version_of(version=9), "routers show 9"),
        asked("ROUTER_VERSION_NOT_FOUND", "unknown", version_of("unknown", version=1),
            "routers show 1 --model unknown"),
        asked("ROUTER_VERSION_NOT_FOUND", "9", move(version=9), "routers promote 9"),
        asked("ROUTER_VERSION_NOT_FOUND", "9", going_on(version=9), "calibrate --model acme --from 9"),
        asked("CALIBRATION_NOT_FOUND", "cal-0", jobs.GetCalibrationRequest(calibration_id="cal-0")),
        asked("CALIBRATION_NOT_FOUND", "cal-0", jobs.CancelCalibrationRequest(calibration_id="cal-0"),
            "jobs cancel cal-0"),
        asked("CALIBRATION_NOT_FOUND", "../x", jobs.WatchCalibrationRequest(calibration_id="../x"), "jobs watch ../x"),
        asked("TEXT_FILE_NOT_FOUND", "missing.txt", text_file("missing.txt"),
            "calibrate --text {folder}/texts/missing.txt"),
        Row("SERVICE_NOT_FOUND", "nobody", HealthCheckRequest(service="nobody")),
        Row("PATH_NOT_FOUND", "/v1/nothing", None, ("GET", "/v1/nothing", "")),
    ],
    (NOT_NOW, 400): [
        Row("ROUTER_REQUIRED", "neap calibrate", relaxed(), {"neap": {"policy": "relaxed"}}, "--policy relaxed"),
        Row("PROMPT_DIFFERS", "", resumed(token_ids=[5], prompt_digest="0" * 32)),
        Row("NUMERICS_DIFFER", "", resumed(token_ids=[5], numerics_id="another", only_exactly=True)),
        asked("NO_TEXT_WORKERS", "--text-worker", job(self_generated=OWN(use_workers=True)), "calibrate --workers"),
        asked("NO_STATISTICS", "1", going_on(version=1), "calibrate --model acme --from 1"),
        asked("PARENT_MISMATCH", DIGEST, going_on(version=1, manifest_digest=DIGEST)),
        asked("NOTHING_TO_PUBLISH", "queued", jobs.RetryCalibrationRequest(calibration_id="{job}"), "jobs retry {job}"),
        asked("OTHER_POOL", "latest@legal", move(version=3), "routers promote 3"),
        asked("CHECKS_FAILED", "speed", move(version=4), "routers promote 4"),
        asked("NO_EARLIER_VERSION", "stable", router.RollbackAliasRequest(model_id="acme", alias="stable"),
            "routers rollback"),
        asked("NO_CANARY", "stable", router.PromoteCanaryRequest(model_id="acme", alias="stable"), "routers promote"),
        asked("JUDGE_OFF", "--judge", router.BeginTrialRequest(model_id="acme", alias="stable", version=2),
            "routers try 2"),
        asked("JUDGE_OFF", "--judge", router.ReportServedRequest(worker_id="a" * 32, sequence=1, model_id="acme")),
    ],
    (CHANGED, 409): [
        asked("ALIAS_MOVED", "version 1 now", move(expected_version=9), "routers promote 2 --expect 9"),
        asked("CANARY_MOVED", "version 2 now", router.PromoteCanaryRequest(
            model_id="acme", alias="tried", expected_canary=1)),
    ],
    (StatusCode.ALREADY_EXISTS, 409): [
        asked("ALREADY_EXISTS", "first", job("first", seed=1), "calibrate --request-id first --seed 1"),
    ],
    (FULL, 429): [
        Row("KV_BUDGET", "bytes", {"stopping": pb.Stopping(max_tokens=2000)}, {"max_tokens": 2000},
            "--max-tokens 2000"),
        asked("QUEUE_FULL", "1 calibrations", job(), "calibrate"),
    ],
    (UNKNOWN, 401): [
        Row("TOKEN_MISSING", "Bearer", {}, {}, "", None),
        Row("TOKEN_UNKNOWN", "", {}, {}, "", "wrong"),
    ],
    (DENIED, 403): [
        Row("ROLE_MISSING", "generate", {}, {}, "", "calibrate"),
        asked("ROLE_MISSING", "alias", job(aliases=["stable"]), "calibrate --alias stable", "calibrate"),
        asked("ROLE_MISSING", "admin", move(), "routers promote 2", "calibrate"),
        Row("PRIORITY_NOT_ALLOWED", "-1", {"priority": -1}, {"neap": {"priority": -1}}, "--priority -1"),
        Row("POOL_NOT_ALLOWED", "generate's", {"pool": "legal"}, None, "--pool legal", "generate"),
        Row("POOL_NOT_ALLOWED", "another pool", exact_with(alias="latest@legal"),
            {"neap": {"router_alias": "latest@legal"}}, "--router latest@legal", "generate"),
    ],
    (INVALID, 405): [Row("METHOD_NOT_ALLOWED", "/v1/models", None, ("POST", "/v1/models", ""))],
    (INVALID, 413): [Row("BODY_TOO_LARGE", "bytes", None, {"prompt": "x" * (1 << 20)})],
}  # fmt: skip

# By kind: a test file, and the reasons that it provokes.
ELSEWHERE = {
    "other requests, time and company": """inference_service/test_pools ROUTER_LOOKUPS_BUSY
        inference_service/test_served_reports BAD_REPORT calibrator_service/judge/test_judge CANARY_RUNS
        FORBIDDEN_VERSION NOT_ACTING neap_engine/gateway/test_bad_requests BAD_HTTP ORIGIN_NOT_ALLOWED
        neap_engine/gateway/test_clients CLIENT_GONE neap_engine/gateway/test_floods ANSWER_TOO_LARGE GATEWAY_FULL
        neap_engine/gateway/test_worker_errors CANCELLED HANDED_OVER GRPC_UNAVAILABLE protos/neap_client/test_affinity
        BUSY protos/neap_client/test_generation CANNOT_RESUME DEADLINE_EXCEEDED INCOMPLETE_ANSWER SHUTTING_DOWN
        SLOW_READER UNAVAILABLE protos/neap_client/test_lost_workers LOST_WITH_WORKERS protos/neap_client/test_watches
        TOO_MANY_WATCHERS shared/engine/test_engine DEADLINE_TOO_SHORT shared/rpc/test_access TOKEN_MALFORMED
        shared/rpc/test_outline REQUEST_TOO_COMPLEX shared/rpc/test_calls REQUEST_MISSING REQUEST_TIMEOUT
        TOO_MANY_IDLE_CALLS shared/rpc/test_interceptors CLIENT_LIMIT MALFORMED_REQUEST NOT_FOUND shared/test_blocking
        TOO_MANY_CALLS""",
    "faults of disks, registries and processes": """calibrator_service/test_fleet WORKER_HAS_OTHER_MODEL
        calibrator_service/test_jobs JOB_PROCESS_DIED JOB_UNREADABLE SCHEMA_NOT_SUPPORTED
        calibrator_service/test_publisher DATABASE_BUSY DISK_FULL INTERNAL MANIFEST_TOO_LARGE OBJECT_STORE_REFUSED
        PRODUCT_LOST REDIS_ERROR REDIS_FULL REDIS_UNAVAILABLE SCHEMA_TOO_NEW shared/constraints/test_compiler
        CONSTRAINTS_NOT_COMPILED shared/engine/drafting/test_ladder_cache ROUTER_OVER_MEMORY SELF_TEST_FAILED
        shared/engine/test_failures DRAFT_OUT_OF_RANGE ENGINE_FAILED NON_FINITE_LOGITS OUT_OF_MEMORY
        shared/registry/test_contract_damage VERSION_DAMAGED shared/registry/test_faults OBJECT_STORE_BUSY
        OBJECT_STORE_UNAVAILABLE REDIS_REFUSED shared/registry/test_folder JOURNAL_INCOMPLETE NO_CONDITIONAL_WRITES
        STORAGE_UNAVAILABLE shared/registry/test_marks PUBLICATION_RUNNING PUBLICATION_TOO_SLOW SWEEP_RUNNING
        SWEEP_TOO_SLOW shared/registry/test_redis_index INDEX_OF_ANOTHER_REGISTRY shared/registry/test_schema
        SCHEMA_TOO_OLD shared/test_files LOCKED""",
    "ranks": """shared/model/ranks/test_families
        TENSOR_PARALLEL_NOT_SUPPORTED shared/model/ranks/test_group RANKS_DIFFER RANKS_MISSING
        shared/model/ranks/test_own_group RANK_LOST""",
    "a model, its files and this machine, at the start": """e2e/test_worker_process BAD_DEVICE BAD_REGISTRY NOT_READY
        calibrator_service/test_jobs_over_grpc DATA_DIR_IN_USE inference_service/test_main BAD_CONFIGURATION
        CPU_PATH_MISSING DEVICE_UNAVAILABLE EXACT_NOT_PROMISED OPS_NOT_BUILT neap_engine/cli/test_doctor
        UNSUPPORTED_MODEL neap_engine/doctor/test_machine OPS_NOT_LOADABLE protos/neap_client/test_balancing
        BAD_ADDRESS protos/neap_client/test_channel BAD_TOKEN TOKENS_OVER_PLAIN_TEXT TOKEN_OVER_PLAIN_TEXT
        shared/chat/test_messages CHAT_TEMPLATE_REFUSED NO_CHAT_TEMPLATE shared/constraints/test_compiler
        CONSTRAINTS_NOT_SUPPORTED NO_TOKENIZER shared/model/test_compute_dtype COMPUTE_DTYPE_NOT_SUPPORTED
        shared/model/test_kv_dtype KV_DTYPE_NOT_SUPPORTED shared/model/test_load CONTEXT_TOO_SHORT
        shared/model/test_paged_kv KV_PAGES shared/model/test_paged_runner PAGES_NOT_SUPPORTED
        shared/model/test_regimes LENGTH_NOT_SUPPORTED shared/model/test_runners CANNOT_COMPILE CANNOT_RECORD
        shared/model/test_source MODEL_GATED shared/model/weights/test_gguf_families FILE_KEY_UNKNOWN
        shared/model/weights/test_gguf_rope ROPE_UNKNOWN TENSORS_LEFT_OUT shared/model/weights/test_gguf_tokenizer
        TOKENIZER_UNKNOWN shared/model/weights/test_reading MODEL_FILE_CHANGED MODEL_FILE_CORRUPT WEIGHTS_MISSING
        WEIGHTS_OVERFLOW shared/ops/test_cards DRIVER_TOO_OLD OPS_NOT_FOR_GPU shared/ops/test_toolkit NO_CUDART
        NO_NVCC NVCC_BROKEN shared/rpc/test_certificates BAD_CERTIFICATE shared/rpc/test_tokens BAD_TOKENS_FILE
        shared/traffic/test_traffic BAD_TRAFFIC_KEY""",
    "what a calibration reads": """calibrator_service/calibration/test_pipeline BUDGET_TOO_SHORT EXIT_TOO_DEEP
        calibrator_service/calibration/test_plan EXITS_NOT_SUPPORTED calibrator_service/calibration/test_statistics
        LAYOUT_MISMATCH TOKENIZER_MISMATCH TOO_LITTLE_TEXT calibrator_service/calibration/text/test_answers BAD_ANSWER
        calibrator_service/calibration/text/test_documents FILE_NOT_FOUND LINE_TOO_LONG NOT_JSON NOT_UNICODE NOT_UTF8
        UNSUPPORTED_FILE_TYPE calibrator_service/calibration/text/test_hub DATASET_CONFIG_NOT_FOUND DATASET_GATED
        DATASET_NOT_FOUND DATASET_SPLIT_NOT_FOUND DATASET_UNAVAILABLE DATASET_UNREADABLE DATASET_UNSUPPORTED
        FIELD_NOT_FOUND""",
    "routers as files, on the Hub and in OCI registries": """neap_engine/cli/test_router_hub BAD_ROUTER_URL CORRUPT
        HUB_DENIED HUB_UNAVAILABLE REVISION_NOT_FOUND ROUTER_MISMATCH ROUTER_NOT_FOUND ROUTER_TOO_LARGE
        neap_engine/cli/test_router_oci REGISTRY_DENIED REGISTRY_UNAVAILABLE neap_engine/cli/test_router_signatures
        SIGNATURE_STALE shared/exchange/test_signatures BAD_KEY EXTRA_MISSING SIGNATURE_INVALID SIGNATURE_MISSING
        shared/ladder/test_artefact_fuzz PICKLE_REFUSED shared/registry/test_contract BAD_BLOBS BAD_BLOB_NAME
        BAD_MANIFEST""",
    "the library and the commands that ask no service": """neap_engine/evaluate/test_main RESULTS_OF_ANOTHER_RUN
        neap_engine/evaluate/test_prompts BAD_PROMPT_FILE neap_engine/hugging_face/test_attach ALREADY_ATTACHED
        UNSUPPORTED_OPTION shared/engine/request/test_options UNKNOWN_OPTION shared/engine/test_engine MODEL_IN_USE
        shared/engine/test_lifetime FORKED""",
}
NO_TEST_NAMES = """
    ACCELERATION_MISMATCH ADDRESS_UNAVAILABLE BLOB_NOT_FOUND CACHE_CAPACITY DATABASE_REPLACED FILE_UNREADABLE
    FOREIGN_DATABASE HUB_REFUSED INDEX_LOST JOB_LOCKED JOURNAL_INCONSISTENT NO_COMPILER NO_NINJA NO_SOURCES
    OPS_BUILD_FAILED PACKAGE_MISSING REGISTRY_BUSY STALLED TOO_MANY_ORDERS UNREAD_ANSWERS
"""
