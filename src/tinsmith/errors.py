"""The one error tree.

Every error that a user can meet says what is wrong, where, and what to do, and carries the HTTP status and the
category that the Tinker protocol wants. One place (`service.app`) turns these into answers; one (`cli`) prints them.
They cross process boundaries, so they must stay picklable: only strings in `args`.

    TinsmithError            500 server   our own fault, or a machine's
    ├── EngineError          500 server   an engine failed at a request that was in order
    │   └── EngineDied       500 server   the engine's process is gone; it is being started again
    └── UserError            400 user     the request or the configuration is not in order
        ├── ConfigError      400          a run file, a service file or a command-line option
        ├── BadRequest       400          a value that no server could serve
        ├── Unsupported      400          a thing that exists and that this server refuses by name
        ├── Unauthorized     401          no key, or one that is not known
        ├── Forbidden        403          not for this key, or beyond what its tenant may have
        ├── NotFound         404          unknown, or another tenant's: the answer is the same
        ├── Gone             410          it was here; submit again
        ├── TooLarge         413          a body or a batch beyond the limits
        └── Busy             429          come back later
"""

from __future__ import annotations


class TinsmithError(Exception):
    """`what` names the fault and its place; `hint` says what to do about it."""

    status = 500
    category = "server"

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what, hint)
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.what} {self.hint}".rstrip()


class EngineError(TinsmithError):
    """An engine failed at a request that was in order."""


class EngineDied(EngineError):
    """The engine's process ended; what it held in memory is gone."""


class UserError(TinsmithError):
    """The caller can mend it."""

    status = 400
    category = "user"


class ConfigError(UserError):
    """A run file, a service file or an option of the command line."""


class BadRequest(UserError):
    """A value that no server could serve."""


class Unsupported(UserError):
    """Something real that this server does not do; the hint says what to use instead."""


class Unauthorized(UserError):
    """No key, or one that this server does not know."""

    status = 401


class Forbidden(UserError):
    """Not for this key, or beyond what its tenant may have: no repetition will change it."""

    status = 403


class NotFound(UserError):
    """Unknown here, or another tenant's: both answer alike."""

    status = 404


class Gone(UserError):
    """It was here and is no more; a client submits the request again."""

    status = 410


class TooLarge(UserError):
    """Beyond a limit that the message names."""

    status = 413


class Busy(UserError):
    """Over a quota for now; the same request may go through later."""

    status = 429

    def __init__(self, what: str, hint: str = "", *, retry_after_ms: int = 1000) -> None:
        super().__init__(what, hint)
        self.retry_after_ms = retry_after_ms
