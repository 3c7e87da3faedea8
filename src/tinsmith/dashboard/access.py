"""Who may see the pages: the Host of a request, the key, the cookie after a login, and headers that confine a page.

Without a key, a page is for this machine alone: its address is a loopback address, the request names a loopback host (a
page of another site whose name resolves to 127.0.0.1 names its own), and no proxy has forwarded it.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "tinsmith_dashboard"
LOGIN_S = 12 * 3600.0
"""Time after which a login ends."""
MAX_LOGINS = 1000
OPEN_PATHS = ("/login", "/static/")
"""Paths that need no key: the form, and its style."""
SECURITY = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via")

Accepts = Callable[[str], Awaitable[bool]]
"""Whether a key opens the pages."""


def accepts_only(key: str) -> Accepts:
    """Accept this key. The comparison takes the same time for every other key."""
    expected = hashlib.sha256(key.encode()).digest()

    async def accepts(other: str) -> bool:
        return bool(key) and hmac.compare_digest(hashlib.sha256(other.encode()).digest(), expected)

    return accepts


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Login:
    key: str
    until: float


class Logins:
    """The cookies of those who have logged in, each with the key that it stands for."""

    def __init__(self) -> None:
        self._logins: OrderedDict[str, _Login] = OrderedDict()

    def add(self, key: str) -> str:
        """A new cookie."""
        cookie = secrets.token_urlsafe(32)
        self._logins[cookie] = _Login(key=key, until=time.monotonic() + LOGIN_S)
        while len(self._logins) > MAX_LOGINS:
            self._logins.popitem(last=False)
        return cookie

    def key(self, cookie: str) -> str:
        """The key of a cookie; empty if it is unknown or has ended."""
        login = self._logins.get(cookie)
        return login.key if login is not None and time.monotonic() < login.until else ""

    def remove(self, cookie: str) -> None:
        """End a login."""
        self._logins.pop(cookie, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may see the pages."""

    accepts: Accepts
    logins: Logins
    is_open: Callable[[], bool]
    """Whether requests of this machine need no key."""
    missing: str
    """What to do if there is no key at all; empty if there is one."""
    explanation: str
    """Which key opens the pages, for the form."""

    def is_direct(self, headers: Headers) -> bool:
        """Whether a request comes from a browser on this machine, for a name of this machine, with no proxy between."""
        host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        return is_loopback(host) and not any(name in headers for name in _FORWARDED)

    async def allows(self, headers: Headers) -> bool:
        """Whether a request may see the pages: it is of this machine and that is enough, or has a valid key."""
        if self.is_open() and self.is_direct(headers):
            return True
        key = self.key_of(headers)
        return bool(key) and await self.accepts(key)

    def key_of(self, headers: Headers) -> str:
        """The key of a request, from its cookie, or from X-API-Key for programs; empty without one."""
        return headers.get("x-api-key") or self.logins.key(cookie_of(headers))


def cookie_of(headers: Headers) -> str:
    """The cookie of a login; empty without one."""
    try:
        cookies = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return ""
    return cookies[COOKIE].value if COOKIE in cookies else ""


class AccessMiddleware:
    """ASGI middleware: sends who may not see a page to the login, and adds the headers that confine pages."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_confined(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(SECURITY)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = await self._refusal(Request(scope))
        await (refusal or self._app)(scope, receive, send_confined)

    async def _refusal(self, request: Request) -> Response | None:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        if self._access.missing and not self._access.is_direct(request.headers):
            return PlainTextResponse(f"This dashboard has no key. {self._access.missing}\n", 403)
        if path.startswith(OPEN_PATHS) or await self._access.allows(request.headers):
            return None
        login = f"{request.scope.get('root_path', '')}/login"
        if "hx-request" in request.headers or "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse("The dashboard needs a key: log in again.\n", 401, {"hx-redirect": login})
        query = f"?{request.url.query}" if request.url.query else ""
        return RedirectResponse(f"{login}?next={quote(path + query, safe='')}", 303)


def local_target(target: str) -> str:
    """Where to go after a login: a path of these pages, whatever the link said."""
    has_control = any(ord(letter) < 32 for letter in target)
    is_path = target.startswith("/") and not target.startswith("//") and "\\" not in target
    return target if is_path and not has_control else "/"
