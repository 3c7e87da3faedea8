"""Tokens and links signed with the server's secret: tokens in place of a key, loans of one checkpoint, download links.

The secret is made at the first start and stays in the data folder, so tokens and links outlive a restart.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from pathlib import Path
from typing import Any

import jwt

TOKEN_S = 4 * 3600
"""How long a token stands for a key; clients exchange it for a new one at half of this."""
LINK_S = 3600
"""How long a link can be fetched."""
TOKEN_PREFIX = "eyJ"
"""How every JWT begins: a JSON object in base64."""

_LOGIN = "tinsmith:login"
_WEIGHTS = "tinsmith:weights"


class Signer:
    """Signs tokens and links, and verifies them."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def issue_token(self, owner: str, key: int, bound: str) -> str:
        """A token in place of a key, which must still be valid when the token is used. `whoami` shows its claims."""
        return self._issue(_LOGIN, TOKEN_S, sub=urn(owner), org_id=owner, key=key, bound=bound)

    def read_token(self, token: str) -> tuple[int, str] | None:
        """(number, bound) of the key that a token stands for; None if it stands for none."""
        claims = self._read(token, _LOGIN)
        return (claims["key"], claims["bound"]) if claims else None

    def issue_loan(self, owner: str, path: str, lifetime_s: int) -> str:
        """A token with which any tenant can read one checkpoint of this owner."""
        return self._issue(_WEIGHTS, lifetime_s, owner=owner, path=path)

    def lender(self, token: str, path: str) -> str | None:
        """Whose checkpoint a loan lets read; None unless it is for this path."""
        claims = self._read(token, _WEIGHTS)
        return claims["owner"] if claims and claims["path"] == path else None

    def fingerprint(self, key: str) -> str:
        """A digest that identifies a key and, without the secret, reveals nothing of it."""
        return self._mac(f"key\n{key}")[:16]

    def link(self, path: str, expires: int) -> str:
        """The query that makes a path fetchable without a key until `expires`."""
        return f"expires={expires}&signature={self._mac(f'link {expires} {path}')}"

    def verify_link(self, path: str, expires: int, signature: str) -> bool:
        """Whether `link` made this signature; the link may have expired."""
        return hmac.compare_digest(self._mac(f"link {expires} {path}").encode(), signature.encode())

    def _issue(self, audience: str, lifetime_s: int, **claims: str | int) -> str:
        now = int(time.time())
        return jwt.encode({**claims, "aud": audience, "iat": now, "exp": now + lifetime_s}, self._secret, "HS256")

    def _read(self, token: str, audience: str) -> dict[str, Any] | None:
        try:
            return jwt.decode(
                token,
                self._secret,
                ["HS256"],
                audience=audience,
                options={"require": ["exp", "aud"], "verify_iat": False},
            )
        except jwt.InvalidTokenError:
            return None

    def _mac(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()


def urn(owner: str) -> str:
    """An owner as the protocol names users."""
    return f"tml:user:{owner}"


def load_signer(data: Path) -> Signer:
    """The signer of a data folder."""
    file = data / "signing-key"
    if not file.is_file():
        write_private_file(file, secrets.token_hex(32))
    return Signer(bytes.fromhex(file.read_text().strip()))


def write_private_file(file: Path, text: str) -> None:
    """A new file that its owner alone can read."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(text + "\n")
