"""Tokens and links signed with the server's secret: access tokens, tokens for one checkpoint, and download links.

The secret is generated at the first start and stored in the data folder, so tokens and links remain valid after a
restart.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jwt

from tinsmith.atomic import atomic_write

TOKEN_S = 4 * 3600
"""Lifetime of an access token; clients renew it at half of this."""
LINK_S = 3600
"""Lifetime of a download link."""
KNOWN_TOKENS = 4096
"""Access tokens whose claims are remembered. Clients send theirs with each request, and reading one takes a tenth of
the time of a short request."""
TOKEN_PREFIX = "eyJ"
"""Prefix of every JWT: the first bytes of a JSON object in base64."""

_LOGIN = "tinsmith:login"
_WEIGHTS = "tinsmith:weights"


class Signer:
    """Issues and verifies signed tokens and links."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._claims: OrderedDict[str, dict[str, Any]] = OrderedDict()
        """Claims of the access tokens that were read last."""

    def issue_token(self, owner: str, key: int, binding: str) -> str:
        """An access token for a key, which must still be valid when the token is used. `whoami` shows its claims."""
        return self._issue(_LOGIN, TOKEN_S, sub=urn(owner), org_id=owner, key=key, bound=binding)

    def read_token(self, token: str) -> tuple[int, str] | None:
        """Returns (key id, binding) of an access token; None if the token is invalid or expired."""
        claims = self._claims.get(token)
        if claims is None:
            claims = self._read(token, _LOGIN)
            if claims is None:
                return None
            self._claims[token] = claims
            if len(self._claims) > KNOWN_TOKENS:
                self._claims.popitem(last=False)
        elif claims["exp"] <= time.time():
            del self._claims[token]
            return None
        return claims["key"], claims["bound"]

    def issue_weights_token(self, owner: str, path: str, lifetime_s: int) -> str:
        """A token that lets any tenant read one checkpoint of `owner`."""
        return self._issue(_WEIGHTS, lifetime_s, owner=owner, path=path)

    def checkpoint_owner(self, token: str, path: str) -> str | None:
        """The owner that issued a token for the checkpoint `path`; None if the token is not valid for it."""
        claims = self._read(token, _WEIGHTS)
        return claims["owner"] if claims and claims["path"] == path else None

    def fingerprint(self, key: str) -> str:
        """A digest that identifies a key and reveals nothing about it without the secret."""
        return self._mac(f"key\n{key}")[:16]

    def link(self, path: str, expires: int) -> str:
        """Query string with which `path` can be fetched without a key until `expires`."""
        return f"expires={expires}&signature={self._mac(f'link {expires} {path}')}"

    def verify_link(self, path: str, expires: int, signature: str) -> bool:
        """Whether the signature is valid. Does not check whether the link has expired."""
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
    """URN of a tenant, as the protocol names users."""
    return f"tml:user:{owner}"


def load_signer(data: Path) -> Signer:
    """The signer of a data folder. Generates its secret if there is none."""
    file = data / "signing-key"
    if not file.is_file():
        write_private_file(file, secrets.token_hex(32))
    return Signer(bytes.fromhex(file.read_text().strip()))


def write_private_file(file: Path, text: str) -> None:
    """Write a file that only its owner can read. It is whole after a crash: an empty key would lock everyone out."""
    atomic_write(file, f"{text}\n".encode(), mode=0o600)
