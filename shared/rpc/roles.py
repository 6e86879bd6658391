"""Which roles may call which method. A method that is not named here is refused wherever tokens are asked for."""

from collections.abc import Mapping

from shared.rpc.callers import Role

# Whoever probes health (a kubelet, a load balancer) has no token, and learns nothing but whether the service serves.
OPEN_METHODS = "/grpc.health.v1.Health/"

_ANY = frozenset(Role)
_GENERATE = frozenset((Role.GENERATE,))
_CALIBRATE = frozenset((Role.CALIBRATE,))
_JOBS = frozenset((Role.CALIBRATE, Role.ADMIN))
_ADMIN = frozenset((Role.ADMIN,))

# "/package.Service/Method" -> roles of which the caller must have one.
METHOD_ROLES: Mapping[str, frozenset[Role]] = {
    "/neap.inference.v1.InferenceService/Generate": _GENERATE,
    "/neap.inference.v1.InferenceService/GetModel": _ANY,
    "/neap.inference.v1.InferenceService/ListModels": _ANY,
    # Aliases other than "latest" need ADMIN beside it: see the servicer.
    "/neap.calibration.v1.CalibrationService/CreateCalibration": _CALIBRATE,
    "/neap.calibration.v1.CalibrationService/GetCalibration": _JOBS,
    "/neap.calibration.v1.CalibrationService/ListCalibrations": _JOBS,
    "/neap.calibration.v1.CalibrationService/CancelCalibration": _JOBS,
    "/neap.calibration.v1.CalibrationService/WatchCalibration": _JOBS,
    "/neap.router.v1.RouterService/ListVersions": _ANY,
    "/neap.router.v1.RouterService/GetVersion": _ANY,
    "/neap.router.v1.RouterService/ListAliases": _ANY,
    "/neap.router.v1.RouterService/GetAliasHistory": _ANY,
    "/neap.router.v1.RouterService/Watch": _ANY,
    # What every request without a router of its own is served with.
    "/neap.router.v1.RouterService/SetAlias": _ADMIN,
    "/neap.router.v1.RouterService/SetCanary": _ADMIN,
    "/neap.router.v1.RouterService/PromoteCanary": _ADMIN,
    "/neap.router.v1.RouterService/RollbackAlias": _ADMIN,
    # Tools that describe the service for people send the token they call it with; strangers get no parser to play with.
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ANY,
}
