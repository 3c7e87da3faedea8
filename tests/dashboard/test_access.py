"""Who sees the pages: this machine, or who has the key; and what a page may load."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from starlette.testclient import TestClient

from tests.dashboard.conftest import KEY
from tinsmith.dashboard import access as access_module
from tinsmith.dashboard.access import COOKIE, MAX_LOGINS, Logins, is_loopback, local_target

Made = Callable[..., TestClient]
FORWARDED = (
    {"x-forwarded-for": "10.0.0.1"},
    {"forwarded": "for=10.0.0.1"},
    {"via": "1.1 proxy"},
    {"x-real-ip": "9.9.9.9"},
)


@pytest.mark.parametrize("host", ["127.0.0.1:8020", "localhost:8020", "localhost", "[::1]:8020", "127.8.8.8"])
def test_own_machine_needs_no_key(dashboard: Made, host: str) -> None:
    assert dashboard().get("/runs", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:8020", "localhost.evil.example", "10.0.0.1", ""]
)
def test_other_hosts_need_a_key(dashboard: Made, host: str) -> None:
    # A page of another site whose name now resolves to 127.0.0.1 is served under its own name.
    response = dashboard().get("/runs", headers={"host": host}, follow_redirects=False)
    assert response.status_code == 303
    assert response.headers["location"].startswith("/login?next=")


@pytest.mark.parametrize("headers", FORWARDED, ids=lambda headers: next(iter(headers)))
def test_forwarded_requests_need_a_key(dashboard: Made, headers: dict[str, str]) -> None:
    assert dashboard().get("/runs", headers=headers, follow_redirects=False).status_code == 303
    assert dashboard(missing="Start it with a key.").get("/login", headers=headers).status_code == 403


def test_key_opens_the_pages_until_logout(dashboard: Made) -> None:
    browser = dashboard(is_open=False)
    assert browser.get("/runs?q=a", follow_redirects=False).headers["location"] == "/login?next=%2Fruns%3Fq%3Da"
    assert browser.post("/login", data={"key": "wrong", "next": "/runs"}).status_code == 401
    assert COOKIE not in browser.cookies
    response = browser.post("/login", data={"key": KEY, "next": "/runs?q=a"}, follow_redirects=False)
    assert (response.status_code, response.headers["location"]) == (303, "/runs?q=a")
    assert "httponly" in response.headers["set-cookie"].lower()
    assert "samesite=lax" in response.headers["set-cookie"].lower()
    assert "secure" not in response.headers["set-cookie"].lower()
    assert KEY not in response.headers["set-cookie"]
    assert browser.get("/runs").status_code == 200
    cookie = browser.cookies[COOKIE]
    browser.post("/logout")
    assert browser.get("/runs", headers={"cookie": f"{COOKIE}={cookie}"}, follow_redirects=False).status_code == 303


def test_cookie_of_an_https_proxy_is_secure(dashboard: Made) -> None:
    headers = {"x-forwarded-proto": "https", "host": "example.org"}
    response = dashboard(is_open=False).post("/login", data={"key": KEY}, headers=headers, follow_redirects=False)
    assert "secure" in response.headers["set-cookie"].lower()


def test_programs_send_the_key_in_a_header(dashboard: Made) -> None:
    browser = dashboard(is_open=False)
    for key, status in ((KEY, 200), ("wrong", 401), ("", 401)):
        headers = {"x-api-key": key, "accept": "application/json"}
        assert browser.get("/curves", headers=headers).status_code == status


@pytest.mark.parametrize("path", ["/", "/runs", "/runs/x", "/compare", "/curves", "/runs/x/rollouts", "/nothing"])
def test_no_page_is_open_without_the_key(dashboard: Made, path: str) -> None:
    response = dashboard(is_open=False).get(path, follow_redirects=False)
    assert response.headers["location"].startswith("/login?next=")
    refreshed = dashboard(is_open=False).get(path, headers={"hx-request": "true"}, follow_redirects=False)
    assert (refreshed.status_code, refreshed.headers["hx-redirect"]) == (401, "/login")


def test_pages_load_nothing_from_elsewhere(dashboard: Made) -> None:
    for path in ("/runs", "/static/dashboard.js", "/nothing", "/login"):
        policy = dashboard().get(path).headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy


@pytest.mark.parametrize(
    ("target", "place"),
    [
        ("/runs?q=1", "/runs?q=1"),
        ("//evil.example", "/"),
        ("https://evil.example", "/"),
        ("/\\evil.example", "/"),
        ("/a\r\nset-cookie: x", "/"),
        ("", "/"),
    ],
)
def test_login_leads_to_own_pages_only(target: str, place: str) -> None:
    assert local_target(target) == place


def test_large_forms_are_refused(dashboard: Made) -> None:
    assert dashboard(is_open=False).post("/login", data={"key": KEY, "next": "x" * 10_000}).status_code == 401


def test_logins_end_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    logins = Logins()
    first = logins.add("key")
    cookies = [logins.add("key") for _ in range(MAX_LOGINS)]
    assert (logins.key(first), logins.key(cookies[-1])) == ("", "key")
    monkeypatch.setattr(access_module, "LOGIN_S", -1.0)
    assert logins.key(logins.add("key")) == ""


@pytest.mark.parametrize(("host", "expected"), [("::1", True), ("0.0.0.0", False), ("", False), ("example.org", False)])
def test_loopback_hosts(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
