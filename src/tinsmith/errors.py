"""The error classes of Tinsmith.

Every error a user can meet names the problem, its place, and the fix. It carries the HTTP status and the error category
of the Tinker protocol. `service.http` turns errors into HTTP responses; `cli` prints them. Errors cross process
boundaries and must stay picklable: `args` contains only strings.

    TinsmithError            500 server   a bug here, or a failure of the machine
    ├── InternalError        500 server   an exception that nothing handled
    ├── EngineError          500 server   an engine failed on a valid request
    │   └── EngineDied       500 server   the engine process exited; it is being restarted
    └── UserError            400 user     the request or the configuration is invalid
        ├── ConfigError      400          run file, service file or command-line option
        ├── BadRequest       400          a value that no server could accept
        ├── Unsupported      400          a feature that exists but that this server does not offer
        ├── Unauthorized     401          no API key, or an unknown one
        ├── Forbidden        403          not allowed for this key, or beyond the tenant's permissions
        ├── NotFound         404          unknown, or owned by another tenant: the response is the same
        ├── Gone             410          existed, but is no longer available; submit again
        ├── TooLarge         413          a body or a batch beyond the limits
        └── Busy             429          retry later
"""

from __future__ import annotations


class TinsmithError(Exception):
    """Base class. `message` names the problem and its place; `hint` says how to fix it."""

    status = 500
    category = "server"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()


class InternalError(TinsmithError):
    """An exception that nothing handled. The log has its traceback, with the `request_id`."""

    def __init__(self, message: str, hint: str = "", *, request_id: str = "") -> None:
        super().__init__(message, hint)
        self.request_id = request_id


class EngineError(TinsmithError):
    """An engine failed on a valid request."""


class PortTakenError(EngineError):
    """Another program has taken a port since it was found free; another start looks for another port."""


class EngineDied(EngineError):
    """The engine process exited; its in-memory state is lost.

    `from_outside`: someone ended the process, so no request that ran is the cause.
    """

    process = 0
    """Number of the process among those of a sampler pool, or among the starts of a vLLM; 0 for an engine's own."""

    def __init__(self, message: str, hint: str = "", *, from_outside: bool = False) -> None:
        super().__init__(message, hint)
        self.from_outside = from_outside


class UserError(TinsmithError):
    """An error the caller can fix. `field` is the field of the request that it concerns."""

    status = 400
    category = "user"

    def __init__(self, message: str, hint: str = "", *, field: str | None = None) -> None:
        super().__init__(message, hint)
        self.field = field


class ConfigError(UserError):
    """An invalid run file, service file or command-line option."""


class Unreachable(ConfigError):
    """Data that needs a network or credentials which this machine lacks now."""


class BadRequest(UserError):
    """A value that no server could accept."""


class Unsupported(UserError):
    """A feature that this server does not offer; the hint names an alternative."""


class Unauthorized(UserError):
    """No API key, or one that this server does not know."""

    status = 401


class Forbidden(UserError):
    """Not allowed for this key, or beyond the tenant's permissions; a retry does not help."""

    status = 403


class NotFound(UserError):
    """Unknown, or owned by another tenant; the response does not say which."""

    status = 404


class Gone(UserError):
    """Existed, but is no longer available; clients submit the request again."""

    status = 410


class TooLarge(UserError):
    """Beyond a limit that the message names."""

    status = 413


class Busy(UserError):
    """Over a quota at the moment; the same request may succeed later."""

    status = 429

    def __init__(self, message: str, hint: str = "", *, retry_after_ms: int = 1000) -> None:
        super().__init__(message, hint)
        self.retry_after_ms = retry_after_ms
