"""Signer: tokens, access tokens of checkpoints, and links."""

from __future__ import annotations

import base64
import json
import stat
import time
from pathlib import Path

import jwt
import pytest
from tinker.lib._jwt_auth import _lifetime, _seconds_until_expiry, jwt_claims

from tinsmith.service.tenancy.signing import TOKEN_S, Signer, load_signer, urn

SECRET = b"s" * 32


def test_token_identifies_its_key() -> None:
    signer = Signer(SECRET)
    assert signer.read_token(signer.issue_token("ada", 7, "b")) == (7, "b")


def test_sdk_reads_expiry_and_owner_of_a_token() -> None:
    token = Signer(SECRET).issue_token("ada", 7, "b")
    assert _lifetime(token) == TOKEN_S
    assert TOKEN_S - 300 < _seconds_until_expiry(token) <= TOKEN_S
    claims = jwt_claims(token)
    assert (claims["sub"], claims["org_id"]) == (urn("ada"), "ada")


def test_token_that_was_read_before_is_refused_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    signer = Signer(SECRET)
    token = signer.issue_token("ada", 7, "b")
    assert [signer.read_token(token) for _ in range(2)] == [(7, "b")] * 2
    end = time.time() + TOKEN_S
    monkeypatch.setattr("tinsmith.service.tenancy.signing.time.time", lambda: end)
    assert signer.read_token(token) is None


@pytest.mark.parametrize(
    "fault", ["another secret", "unsigned", "changed", "over", "no end", "a weights token", "no token"]
)
def test_invalid_tokens_are_rejected(fault: str) -> None:
    signer = Signer(SECRET)
    good = signer.issue_token("ada", 7, "b")
    claims = jwt_claims(good)
    head, _, signature = good.split(".")
    forged = base64.urlsafe_b64encode(json.dumps({**claims, "key": 0}).encode()).decode().rstrip("=")
    bad = {
        "another secret": Signer(b"t" * 32).issue_token("ada", 7, "b"),
        "unsigned": jwt.encode(claims, None, "none"),
        "changed": f"{head}.{forged}.{signature}",
        "over": jwt.encode({**claims, "exp": time.time() - 1}, SECRET, "HS256"),
        "no end": jwt.encode({k: v for k, v in claims.items() if k != "exp"}, SECRET, "HS256"),
        "a weights token": signer.issue_weights_token("ada", "tinker://r/weights/a", 60),
        "no token": "eyJ",
    }
    assert signer.read_token(bad[fault]) is None


def test_weights_token_opens_one_path() -> None:
    signer = Signer(SECRET)
    token = signer.issue_weights_token("ada", "tinker://r/weights/a", 60)
    assert signer.checkpoint_owner(token, "tinker://r/weights/a") == "ada"
    assert signer.checkpoint_owner(token, "tinker://r/weights/b") is None
    assert signer.checkpoint_owner(signer.issue_token("ada", 7, "b"), "tinker://r/weights/a") is None


def test_changed_links_are_rejected() -> None:
    signer = Signer(SECRET)
    query = dict(part.split("=") for part in signer.link("folder/file", 100).split("&"))
    assert query["expires"] == "100"
    assert signer.verify_link("folder/file", 100, query["signature"])
    assert not signer.verify_link("folder/other", 100, query["signature"])
    assert not signer.verify_link("folder/file", 101, query["signature"])
    assert not signer.verify_link("folder/file", 100, "ü")


def test_secret_file_is_private(tmp_path: Path) -> None:
    token = load_signer(tmp_path).issue_token("ada", 7, "b")
    assert load_signer(tmp_path).read_token(token) == (7, "b")
    assert stat.S_IMODE((tmp_path / "signing-key").stat().st_mode) == 0o600
