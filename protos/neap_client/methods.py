"""The methods of the services, with their messages, for the synchronous and the asynchronous client."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from neap_client.calibration.v1 import calibration_pb2 as calibration
from neap_client.inference.v1 import inference_pb2 as inference
from neap_client.router.v1 import router_pb2 as router

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


@dataclass(frozen=True)
class Method(Generic[Request, Response]):
    """A method of a service. `repeatable`: calling it twice does the same as calling it once."""

    service: str
    name: str
    request: type[Request]
    response: type[Response]
    repeatable: bool = True

    def unary(self, channel: Any) -> Any:
        """Return a callable that makes a call with one response on `channel`, of either kind."""
        return channel.unary_unary(*self._on_wire())

    def stream(self, channel: Any) -> Any:
        """Return a callable that makes a call with a stream of responses on `channel`, of either kind."""
        return channel.unary_stream(*self._on_wire())

    def _on_wire(self) -> tuple[str, Any, Any]:
        path = f"/{self.service}/{self.name}"
        return path, _serialized, self.response.FromString


def _serialized(request: Message | bytes) -> bytes:
    return request if isinstance(request, bytes) else bytes(request.SerializeToString())


_HEALTH = "grpc.health.v1.Health"
_INFERENCE = "neap.inference.v1.InferenceService"
_CALIBRATION = "neap.calibration.v1.CalibrationService"
_ROUTER = "neap.router.v1.RouterService"

CHECK = Method(_HEALTH, "Check", health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse)

# A generation is repeated and resumed by its stream: see neap_client.generation.
GENERATE = Method(_INFERENCE, "Generate", inference.GenerateRequest, inference.GenerateResponse, repeatable=False)
GET_MODEL = Method(_INFERENCE, "GetModel", inference.GetModelRequest, inference.GetModelResponse)
TOKENIZE = Method(_INFERENCE, "Tokenize", inference.TokenizeRequest, inference.TokenizeResponse)
LIST_MODELS = Method(_INFERENCE, "ListModels", inference.ListModelsRequest, inference.ListModelsResponse)

# Idempotent by its `request_id`.
CREATE_CALIBRATION = Method(
    _CALIBRATION, "CreateCalibration", calibration.CreateCalibrationRequest, calibration.CreateCalibrationResponse
)
GET_CALIBRATION = Method(
    _CALIBRATION, "GetCalibration", calibration.GetCalibrationRequest, calibration.GetCalibrationResponse
)
LIST_CALIBRATIONS = Method(
    _CALIBRATION, "ListCalibrations", calibration.ListCalibrationsRequest, calibration.ListCalibrationsResponse
)
CANCEL_CALIBRATION = Method(
    _CALIBRATION, "CancelCalibration", calibration.CancelCalibrationRequest, calibration.CancelCalibrationResponse
)
RETRY_CALIBRATION = Method(
    _CALIBRATION, "RetryCalibration", calibration.RetryCalibrationRequest, calibration.RetryCalibrationResponse
)
# The first message of a watch carries the whole state, so a repeated call loses nothing.
WATCH_CALIBRATION = Method(
    _CALIBRATION, "WatchCalibration", calibration.WatchCalibrationRequest, calibration.WatchCalibrationResponse
)

LIST_VERSIONS = Method(_ROUTER, "ListVersions", router.ListVersionsRequest, router.ListVersionsResponse)
GET_VERSION = Method(_ROUTER, "GetVersion", router.GetVersionRequest, router.GetVersionResponse)
LIST_ALIASES = Method(_ROUTER, "ListAliases", router.ListAliasesRequest, router.ListAliasesResponse)
GET_ALIAS_HISTORY = Method(_ROUTER, "GetAliasHistory", router.GetAliasHistoryRequest, router.GetAliasHistoryResponse)
WATCH = Method(_ROUTER, "Watch", router.WatchRequest, router.WatchResponse)
# After a lost answer, a repeated call would fail as if another caller had changed the alias, or undo another change.
SET_ALIAS = Method(_ROUTER, "SetAlias", router.SetAliasRequest, router.SetAliasResponse, repeatable=False)
SET_CANARY = Method(_ROUTER, "SetCanary", router.SetCanaryRequest, router.SetCanaryResponse, repeatable=False)
PROMOTE_CANARY = Method(
    _ROUTER, "PromoteCanary", router.PromoteCanaryRequest, router.PromoteCanaryResponse, repeatable=False
)
ROLLBACK_ALIAS = Method(
    _ROUTER, "RollbackAlias", router.RollbackAliasRequest, router.RollbackAliasResponse, repeatable=False
)
BEGIN_TRIAL = Method(_ROUTER, "BeginTrial", router.BeginTrialRequest, router.BeginTrialResponse)
ORDER_JUDGE = Method(_ROUTER, "OrderJudge", router.OrderJudgeRequest, router.OrderJudgeResponse)
GET_JUDGED = Method(_ROUTER, "GetJudged", router.GetJudgedRequest, router.GetJudgedResponse)
REPORT_SERVED = Method(_ROUTER, "ReportServed", router.ReportServedRequest, router.ReportServedResponse)
