"""Every error a user can meet, its stable code, and what each face says for it.

The tree (a class exists where a caller would do something different):

    ClocheError                     anything that Cloche reports; never a failing command, which is a result
    ├── InvalidInput                the request itself is wrong; sending it again is useless
    │   └── PolicyRefused           the request is well formed, a rule forbids it
    ├── NotFound                    the named thing is not there (or not yours)
    ├── Conflict                    it exists, in a state or with a body that forbids this
    ├── SandboxError                the sandbox failed; what ran in it is gone
    │   └── SandboxLost             it ended while in use: killed, expired, or its engine died
    ├── CapacityExceeded            a limit of this engine or host; later may work
    ├── NotSupported                this host, driver or platform cannot do it
    ├── ServerUnavailable           the server that was named does not answer
    ├── CommandFailed               a command failed and the caller asked for `check=True`
    └── InternalError               a defect of ours

`TABLE` is the one place that says what a code means on each face. A code without a row cannot be raised.
Standard library only: the thin client imports this module.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` costs the thin client more than this module
    from collections.abc import Iterable

    from cloche import model


class Face:
    """What one code becomes on each wire."""

    __slots__ = ("cli", "http", "kube", "mcp", "retryable")

    def __init__(self, http: int, cli: int, mcp: int, kube: str, retryable: bool | None = False) -> None:
        self.http = http
        self.cli = cli
        self.mcp = mcp
        self.kube = kube
        self.retryable = retryable


_BAD = Face(400, 125, -32602, "Invalid")
_UNKNOWN = Face(401, 125, -32602, "Unauthorized")
_FORBIDDEN = Face(403, 125, -32602, "Forbidden")
_MISSING = Face(404, 125, -32602, "NotFound")
_CLASH = Face(409, 125, -32602, "Conflict")
_GONE = Face(410, 125, -32603, "Gone")
_LARGE = Face(413, 125, -32602, "RequestEntityTooLarge")
_FULL = Face(429, 125, -32603, "TooManyRequests", retryable=True)
_BROKEN = Face(500, 125, -32603, "InternalError", retryable=None)
_UNSUPPORTED = Face(501, 125, -32603, "NotImplemented")
_GATEWAY = Face(502, 125, -32603, "BadGateway", retryable=True)
_AWAY = Face(503, 125, -32603, "ServiceUnavailable", retryable=True)

TABLE: dict[str, Face] = {
    # invalid input
    "argument_invalid": _BAD,
    "argument_too_long": _LARGE,
    "name_invalid": _BAD,
    "environment_invalid": _BAD,
    "field_unknown": _BAD,
    "flag_unknown": _BAD,
    "limit_invalid": _BAD,
    "path_invalid": _BAD,
    "path_loop": _BAD,
    "cwd_not_found": _BAD,
    "profile_unknown": _BAD,
    "mode_unknown": _BAD,
    "policy_invalid": _BAD,
    "settings_invalid": _BAD,
    "command_empty": _BAD,
    "signal_unknown": _BAD,
    "language_unknown": _BAD,
    "not_text": _BAD,
    "not_regular_file": _BAD,
    "is_directory": _BAD,
    "not_directory": _BAD,
    "workspace_not_found": _BAD,
    "workspace_refused": _BAD,
    "socket_path_too_long": _BAD,
    "secret_invalid": _BAD,
    "action_invalid": _BAD,
    "template_invalid": _BAD,
    "pool_invalid": _BAD,
    "field_refused": _BAD,
    "image_reference_invalid": _BAD,
    "image_invalid": _BAD,
    "image_digest_mismatch": _BAD,
    "recipe_invalid": _BAD,
    "recipe_step_failed": Face(422, 125, -32603, "BuildFailed"),
    "image_too_large": _LARGE,
    "file_too_large": _LARGE,
    "body_too_large": _LARGE,
    "body_type_refused": Face(415, 125, -32602, "UnsupportedMediaType"),
    "head_too_large": Face(431, 125, -32602, "RequestHeaderFieldsTooLarge"),
    "url_too_long": Face(414, 125, -32602, "RequestUriTooLong"),
    "request_too_slow": Face(408, 125, -32603, "Timeout", retryable=True),
    "request_malformed": _BAD,
    "method_refused": Face(405, 125, -32601, "MethodNotAllowed"),
    "address_unavailable": _BAD,
    "tls_required": _BAD,
    "output_too_large": _LARGE,
    # rules
    "host_path_refused": _FORBIDDEN,
    "permission_denied": _FORBIDDEN,
    "user_refused": _FORBIDDEN,
    "isolation_too_low": _FORBIDDEN,
    "network_refused": _FORBIDDEN,
    "limit_refused": _FORBIDDEN,
    "environment_refused": _FORBIDDEN,
    "secret_refused": _FORBIDDEN,
    "policy_untrusted": _FORBIDDEN,
    "peer_refused": _FORBIDDEN,
    "key_missing": _UNKNOWN,
    "key_refused": _UNKNOWN,
    "link_refused": _UNKNOWN,
    "token_invalid": _UNKNOWN,
    "token_expired": _UNKNOWN,
    "scope_missing": _FORBIDDEN,
    "apply_refused": _FORBIDDEN,
    "image_layer_refused": _FORBIDDEN,
    "image_auth_required": Face(401, 125, -32602, "Unauthorized"),
    # not there
    "sandbox_not_found": _MISSING,
    "key_not_found": _MISSING,
    "route_not_found": Face(404, 125, -32601, "NotFound"),
    "template_not_found": _MISSING,
    "pool_not_found": _MISSING,
    "claim_not_found": _MISSING,
    "snapshot_not_found": _MISSING,
    "volume_not_found": _MISSING,
    "execution_not_found": _MISSING,
    "context_not_found": _MISSING,
    "question_not_found": _MISSING,
    "file_not_found": _MISSING,
    "user_not_found": _MISSING,
    "image_not_found": _MISSING,
    "secret_not_found": _MISSING,
    # conflicts
    "name_conflict": _CLASH,
    "version_conflict": Face(412, 125, -32602, "Conflict"),
    "template_in_use": _CLASH,
    "sandbox_claimed": _CLASH,
    "volume_in_use": _CLASH,
    "file_exists": _CLASH,
    "directory_not_empty": _CLASH,
    "state_locked": _CLASH,
    "state_too_new": _CLASH,
    "state_corrupt": _CLASH,
    "secrets_locked": _CLASH,
    "secrets_corrupt": _CLASH,
    "execution_finished": _CLASH,
    "context_busy": _CLASH,
    "context_has_threads": _CLASH,
    "used_after_fork": _CLASH,
    "sandbox_stopped": _CLASH,
    "image_in_use": _CLASH,
    # the sandbox failed
    "sandbox_lost": _GONE,
    "sandbox_expired": _GONE,
    "sandbox_create_failed": _BROKEN,
    "sandbox_disk_full": _BROKEN,
    "startup_failed": _BROKEN,
    "context_lost": _GONE,
    "guest_misbehaved": _BROKEN,
    "launcher_lost": Face(500, 125, -32603, "InternalError", retryable=True),
    # capacity
    "capacity_exceeded": _FULL,
    "quota_exceeded": _FULL,
    "rate_exceeded": _FULL,
    "disk_full": Face(507, 125, -32603, "InsufficientStorage", retryable=True),
    "wait_timeout": Face(504, 125, -32603, "Timeout", retryable=True),
    # this host cannot
    "linux_only": _UNSUPPORTED,
    "kernel_feature_missing": _UNSUPPORTED,
    "needs_subuids": _UNSUPPORTED,
    "not_supported_by_driver": _UNSUPPORTED,
    "image_tool_missing": _UNSUPPORTED,
    # the server
    "server_unavailable": _AWAY,
    "server_version_mismatch": Face(426, 125, -32603, "UpgradeRequired"),
    "server_busy": _AWAY,
    "server_stopping": _AWAY,
    "connection_lost": _AWAY,
    "reader_too_slow": _AWAY,
    "port_closed": _GATEWAY,
    "port_misbehaved": _GATEWAY,
    "audit_unavailable": _AWAY,
    "network_unavailable": _AWAY,
    "image_registry_failed": _AWAY,
    # asked for
    "command_failed": Face(422, 1, -32603, "CommandFailed"),
    # ours
    "internal_error": _BROKEN,
}


class ClocheError(Exception):
    """Anything Cloche reports: a stable `code`, a sentence, what to do, and data for programs."""

    default_code = "internal_error"
    record = ""
    """What the audit log is told in place of the message, where the caller should not learn it. It crosses no wire."""

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        hint: str | None = None,
        details: dict[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code or self.default_code
        self.message = message
        self.hint = hint
        self.details = details or {}
        self.retryable = TABLE[self.code].retryable

    def __str__(self) -> str:
        return f"{self.message} ({self.code})" + (f"\n\nhint: {self.hint}" if self.hint else "")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r}, code={self.code!r})"

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default pickling, and errors cross process pools. The state
        # brings the rest: hint, details, and what a subclass holds (`CommandFailed.result`).
        return (_rebuild, (type(self), self.message, self.code), self.__dict__)

    def to_dict(self) -> dict[str, object]:
        return {"code": self.code, "message": self.message, "hint": self.hint, "details": self.details}


class InvalidInput(ClocheError):
    """The request is wrong as written."""

    default_code = "argument_invalid"


class PolicyRefused(InvalidInput):
    """A rule forbids the request; the message names the rule."""

    default_code = "permission_denied"


class NotFound(ClocheError):
    """The named thing does not exist, or is not yours."""

    default_code = "sandbox_not_found"


class Conflict(ClocheError):
    """The thing exists in a state, or with a body, that forbids this."""

    default_code = "name_conflict"


class SandboxError(ClocheError):
    """The sandbox itself failed; the command's outcome is unknown."""

    default_code = "sandbox_create_failed"


class SandboxLost(SandboxError):
    """The sandbox ended while it was being used."""

    default_code = "sandbox_lost"


class CapacityExceeded(ClocheError):
    """A limit of this engine or host was reached."""

    default_code = "capacity_exceeded"


class NotSupported(ClocheError):
    """This host, driver or platform cannot do it."""

    default_code = "not_supported_by_driver"


class ServerUnavailable(ClocheError):
    """The server that was named does not answer."""

    default_code = "server_unavailable"


class CommandFailed(ClocheError):
    """A command did not exit with 0 and the caller asked for `check=True`; `.result` holds everything."""

    default_code = "command_failed"
    result: "model.ExecResult" = None  # type: ignore[assignment]  # whoever raises it sets it


class InternalError(ClocheError):
    """A defect of ours; please report it."""

    default_code = "internal_error"


# What is not named here is InvalidInput.
_CODES: dict[type[ClocheError], str] = {
    PolicyRefused: (
        "host_path_refused permission_denied user_refused isolation_too_low network_refused peer_refused apply_refused "
        "key_missing key_refused link_refused token_invalid token_expired scope_missing image_layer_refused image_auth_required "
        "limit_refused environment_refused secret_refused policy_untrusted"
    ),
    NotFound: (
        "sandbox_not_found key_not_found route_not_found template_not_found pool_not_found claim_not_found snapshot_not_found volume_not_found "
        "execution_not_found context_not_found question_not_found file_not_found user_not_found image_not_found"
        " secret_not_found"
    ),
    Conflict: (
        "name_conflict version_conflict template_in_use sandbox_claimed volume_in_use file_exists directory_not_empty state_locked state_too_new state_corrupt execution_finished "
        "context_busy context_has_threads used_after_fork sandbox_stopped image_in_use"
        " secrets_locked secrets_corrupt"
    ),
    SandboxError: "sandbox_create_failed startup_failed sandbox_disk_full guest_misbehaved launcher_lost",
    SandboxLost: "sandbox_lost sandbox_expired context_lost",
    CapacityExceeded: "capacity_exceeded quota_exceeded rate_exceeded disk_full wait_timeout",
    NotSupported: "linux_only kernel_feature_missing needs_subuids not_supported_by_driver image_tool_missing",
    ServerUnavailable: (
        "server_unavailable server_version_mismatch server_busy server_stopping connection_lost reader_too_slow audit_unavailable network_unavailable "
        "image_registry_failed port_closed port_misbehaved"
    ),
    CommandFailed: "command_failed",
    InternalError: "internal_error",
}
_CLASS_OF_CODE = {code: kind for kind, codes in _CODES.items() for code in codes.split()}


def class_of(code: str) -> type[ClocheError]:
    """The class that a code is raised as; for a code without a row, KeyError."""
    if code not in TABLE:
        raise KeyError(code)
    return _CLASS_OF_CODE.get(code, InvalidInput)


def error(code: str, message: str, *, hint: str | None = None, **details: object) -> ClocheError:
    """The error of `code`, in the class that belongs to it: `raise errors.error("limit_invalid", "…")`."""
    return class_of(code)(message, code=code, hint=hint, details=details)


def from_dict(data: dict[str, object]) -> ClocheError:
    """An error that crossed a wire. An unknown code (a newer server) stays readable as an internal error."""
    code = str(data.get("code"))
    message, hint = str(data.get("message")), data.get("hint")
    details = data.get("details")
    if code not in TABLE:
        message, code = f"{message} [{code}]", "internal_error"
    made = error(code, message, hint=None if hint is None else str(hint))
    made.details = dict(details) if isinstance(details, dict) else {}
    return made


def nearest(word: str, known: "Iterable[str]") -> str:
    """A hint for a word that is not one of `known`: the likely one if there is any, else all of them."""
    from difflib import get_close_matches  # costs as much as this whole module: paid by mistakes only

    names = sorted(known)
    close = get_close_matches(word, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(names)}"


def _rebuild(kind: type[ClocheError], message: str, code: str) -> ClocheError:
    return kind(message, code=code)
