"""Encryption of external weights with age, for the recipients that a client names.

Encryption is pyrage's, the Rust implementation of age: recipients are native (age1…) or SSH public keys.
"""

# pyright: reportAttributeAccessIssue=false
# pyrage is compiled and says nothing of its types.
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyrage

from tinsmith.atomic import atomic_folder, folder_size
from tinsmith.errors import BadRequest

RECIPIENTS = 10
"""Maximum number of recipients in the protocol."""


def recipients(public_keys: Sequence[str]) -> list[Any]:
    """Parse public keys of age or SSH. Raises BadRequest with the index of an invalid one."""
    if len(public_keys) > RECIPIENTS:
        raise BadRequest(f"{len(public_keys)} age_encryption_recipients are too many.", f"Give at most {RECIPIENTS}.")
    return [_recipient(index, text.strip()) for index, text in enumerate(public_keys)]


def _recipient(index: int, text: str) -> Any:
    kind = pyrage.ssh.Recipient if text.startswith("ssh-") else pyrage.x25519.Recipient
    try:
        return kind.from_str(text)
    except pyrage.RecipientError as error:
        raise BadRequest(
            f"age_encryption_recipients[{index}] is not a public key of age or SSH: {error}.",
            "Give age1… (see age-keygen -y), ssh-ed25519 … or ssh-rsa ….",
        ) from error


def encrypt(plain: Path, to: Path, public_keys: Sequence[str]) -> int:
    """Every file of `plain` as NAME.age in `to`, which appears whole or not at all. Returns bytes."""
    keys = recipients(public_keys)
    with atomic_folder(to) as part:
        for file in sorted(plain.iterdir()):
            pyrage.encrypt_file(str(file), str(part / f"{file.name}.age"), keys)
        return folder_size(part)
