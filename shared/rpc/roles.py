"""Maps methods to the roles that may call them. If tokens are required, a method that is not listed here is refused."""

from collections.abc import Mapping

from shared.rpc.callers import Role

# Health probes (a kubelet, a load balancer) have no token. They learn only whether the service serves.
OPEN_METHODS = "/grpc.health.v1.Health/"

_ANY = frozenset(Role)
_GENERATE = frozenset((Role.GENERATE,))
_CALIBRATE = frozenset((Role.CALIBRATE,))
_JOBS = frozenset((Role.CALIBRATE, Role.ADMIN))
_ADMIN = frozenset((Role.ADMIN,))

# "/package.Service/Method" -> roles. The caller must have at least one of them.
METHOD_ROLES: Mapping[str, frozenset[Role]] = {
    "/neap.inference.v1.InferenceService/Generate": _GENERATE,
    "/neap.inference.v1.InferenceService/Tokenize": _GENERATE,
    "/neap.inference.v1.InferenceService/GetModel": _ANY,
    "/neap.inference.v1.InferenceService/ListModels": _ANY,
    # A spec with aliases other than "latest" needs ADMIN, too: see the servicer.
    "/neap.calibration.v1.CalibrationService/CreateCalibration": _CALIBRATE,
    "/neap.calibration.v1.CalibrationService/GetCalibration": _JOBS,
    "/neap.calibration.v1.CalibrationService/ListCalibrations": _JOBS,
    "/neap.calibration.v1.CalibrationService/CancelCalibration": _JOBS,
    "/neap.calibration.v1.CalibrationService/RetryCalibration": _JOBS,
    "/neap.calibration.v1.CalibrationService/WatchCalibration": _JOBS,
    "/neap.router.v1.RouterService/ListVersions": _ANY,
    "/neap.router.v1.RouterService/GetVersion": _ANY,
    "/neap.router.v1.RouterService/ListAliases": _ANY,
    "/neap.router.v1.RouterService/GetAliasHistory": _ANY,
    "/neap.router.v1.RouterService/Watch": _ANY,
    # These change the router of every request that names no version.
    "/neap.router.v1.RouterService/SetAlias": _ADMIN,
    "/neap.router.v1.RouterService/SetCanary": _ADMIN,
    "/neap.router.v1.RouterService/PromoteCanary": _ADMIN,
    "/neap.router.v1.RouterService/RollbackAlias": _ADMIN,
    # Tools that use reflection can send a token. Unauthenticated callers are kept away from its parser.
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ANY,
}
