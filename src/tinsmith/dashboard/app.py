"""The ASGI application of the dashboard, alone or inside `tinsmith serve` at a path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tinsmith.dashboard.access import COOKIE, LOGIN_S, Access, AccessMiddleware, cookie_of, local_target
from tinsmith.dashboard.pages import Pages
from tinsmith.dashboard.rollout_pages import RolloutPages
from tinsmith.dashboard.run_pages import RunPages
from tinsmith.dashboard.runs import Runs
from tinsmith.dashboard.service_pages import ServicePages
from tinsmith.dashboard.service_state import ServiceClient
from tinsmith.rl.history.rollout_html import STYLE

_FORM_BYTES = 8192
_TYPES = {".css": "text/css", ".js": "text/javascript", ".txt": "text/plain"}
_CACHED = "public, max-age=86400"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What the dashboard shows."""

    folders: Sequence[Path] = ()
    """Folders of runs."""
    service: ServiceClient | None = None


def create_app(sources: Sources, access: Access) -> ASGIApp:
    """The dashboard of some folders, a service, or both."""
    has_runs, has_service = bool(sources.folders), sources.service is not None
    pages = Pages(access, has_runs=has_runs, has_service=has_service)
    session = _SessionPages(access, pages)
    routes = [
        Route("/", partial(_start, "/runs" if has_runs else "/service")),
        Route("/login", session.show_login, methods=["GET"]),
        Route("/login", session.log_in, methods=["POST"]),
        Route("/logout", session.log_out, methods=["POST"]),
        Route("/static/{name}", _static),
    ]
    if has_runs:
        runs = Runs(sources.folders)
        routes += [*RunPages(runs, pages).routes, *RolloutPages(runs, pages).routes]
    if sources.service is not None:
        routes += ServicePages(sources.service, access, pages).routes
    return Starlette(
        routes=routes,
        middleware=[Middleware(AccessMiddleware, access=access)],
        exception_handlers={HTTPException: partial(_refusal, pages)},
    )


class _SessionPages:
    """Endpoints to log in and out."""

    def __init__(self, access: Access, pages: Pages) -> None:
        self._access, self._pages = access, pages

    async def show_login(self, request: Request) -> Response:
        """The form for the key."""
        return self._form(request, request.query_params.get("next", ""))

    async def log_in(self, request: Request) -> Response:
        """Check the key, and give a cookie for it."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _FORM_BYTES:
                return self._form(request, "", refused=True)
        fields = parse_qs(body.decode(errors="replace"))
        key, target = (fields.get(name, [""])[0] for name in ("key", "next"))
        if not await self._access.accepts(key.strip()):
            return self._form(request, target, refused=True)
        root = request.scope.get("root_path", "")
        response = RedirectResponse(root + local_target(target.removeprefix(root)), 303)
        is_secure = request.url.scheme == "https" or request.headers.get("x-forwarded-proto") == "https"
        response.set_cookie(
            COOKIE,
            self._access.logins.add(key.strip()),
            max_age=int(LOGIN_S),
            path=root or "/",
            secure=is_secure,
            httponly=True,
            samesite="lax",
        )
        return response

    async def log_out(self, request: Request) -> Response:
        """End the login."""
        self._access.logins.remove(cookie_of(request.headers))
        root = request.scope.get("root_path", "")
        response = RedirectResponse(f"{root}/login", 303)
        response.delete_cookie(COOKIE, path=root or "/")
        return response

    def _form(self, request: Request, target: str, *, refused: bool = False) -> Response:
        return self._pages.render(
            request,
            "login.html",
            code=401 if refused else 200,
            live=False,
            next=local_target(target),
            refused=refused,
            explanation=self._access.explanation,
        )


async def _start(place: str, request: Request) -> Response:
    return RedirectResponse(request.scope.get("root_path", "") + place, 303)


def _static(request: Request) -> Response:
    """A file of the package; its address changes with the version."""
    folder = files("tinsmith.dashboard") / "static"
    names = {each.name for each in folder.iterdir()}
    name = request.path_params["name"]
    if name == "rollout.css":
        return Response(STYLE, media_type=_TYPES[".css"], headers={"cache-control": _CACHED})
    if name not in names:
        raise HTTPException(404)
    kind = _TYPES.get(Path(name).suffix, "application/octet-stream")
    return Response((folder / name).read_bytes(), media_type=kind, headers={"cache-control": _CACHED})


async def _refusal(pages: Pages, request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return pages.message(request, "There is no such page", "See the pages above.", code=error.status_code)
