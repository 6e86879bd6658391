"""Decides who may call which method. Every call is checked before its request message is read."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from neap_client.channel import AUTHORIZATION_KEY

from shared.errors import NeapError, PermissionDenied, Unauthenticated
from shared.rpc.callers import Caller, Role
from shared.rpc.tokens import MAX_TOKEN_CHARACTERS, TokenEntry, find_caller, parse_tokens
from shared.rpc.watched_files import WatchedFiles

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
    **{f"/vllm.grpc.engine.VllmEngine/{name}": _GENERATE for name in ("Generate", "Abort", "GetTokenizer")},
    **{f"/vllm.grpc.engine.VllmEngine/{name}": _ANY for name in ("HealthCheck", "GetLoads")},
    **{f"/vllm.grpc.engine.VllmEngine/{name}": _ANY for name in ("GetModelInfo", "GetServerInfo")},
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
    "/neap.router.v1.RouterService/BeginTrial": _ADMIN,
    "/neap.router.v1.RouterService/OrderJudge": _ADMIN,
    "/neap.router.v1.RouterService/GetJudged": _ANY,
    # Reports decide which version is promoted, as publications do.
    "/neap.router.v1.RouterService/ReportServed": _CALIBRATE,
    # Tools that use reflection can send a token. Unauthenticated callers are kept away from its parser.
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ANY,
}


_SCHEME = "bearer "


class Access:
    """Checks the token of each call. If `tokens_file` is None, everybody may call everything.

    The file is read again for every call. A token that was removed from it is refused from the next call on; running
    calls go on. `refusals` counts refused calls by reason. Raises InvalidInput (BAD_TOKENS_FILE, BAD_CONFIGURATION).
    """

    def __init__(self, tokens_file: Path | None = None) -> None:
        self.refusals: Counter[str] = Counter()
        self.files: WatchedFiles[tuple[TokenEntry, ...]] | None = None
        if tokens_file is not None:
            self.files = WatchedFiles(
                "tokens", [tokens_file], lambda contents: parse_tokens(contents[0], str(tokens_file))
            )

    def check_call(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Caller | NeapError | None:
        """Check a call of `method` ("/package.Service/Method").

        Returns the caller, or the error with which to refuse the call. None means that no token is required.
        """
        if self.files is None or method.startswith(OPEN_METHODS):
            return None
        self.files.refresh()
        try:
            return _permitted(_caller(self.files.value, metadata), method)
        except NeapError as error:
            self.refusals[error.reason] += 1
            return error


def _caller(entries: Iterable[TokenEntry], metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
    values = [value for key, value in metadata if key == AUTHORIZATION_KEY]
    if not values:
        raise Unauthenticated("the call has no token: send 'authorization: Bearer TOKEN'", reason="TOKEN_MISSING")
    value = values[0]
    # With several values, a proxy in front of the service might check one and the service another.
    if len(values) > 1 or not isinstance(value, str) or not value[:7].lower() == _SCHEME:
        raise Unauthenticated("authorization must be a single 'Bearer TOKEN'", reason="TOKEN_MALFORMED")
    token = value[len(_SCHEME) :].strip()
    caller = find_caller(entries, token) if len(token) <= MAX_TOKEN_CHARACTERS else None
    if caller is None:
        raise Unauthenticated("the service does not know this token", reason="TOKEN_UNKNOWN")
    return caller


def _permitted(caller: Caller, method: str) -> Caller:
    allowed = METHOD_ROLES.get(method, frozenset())
    if not allowed & caller.roles:
        roles = ", ".join(sorted(allowed)) or "that no token has"
        raise PermissionDenied(
            f"{method} needs a role: {roles}", reason="ROLE_MISSING", metadata={"roles": roles, "caller": caller.name}
        )
    return caller
