"""Encryption of external weights for the recipients that a client names.

Uses pyrage, a binding of the Rust implementation of age. Recipients are age (age1…) or SSH public keys.
"""

# pyright: reportAttributeAccessIssue=false
# pyrage is a compiled module without type stubs.
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyrage

from tinsmith.atomic import atomic_folder, folder_size
from tinsmith.errors import BadRequest

RECIPIENTS = 10
"""Maximum number of recipients that the protocol allows."""


def recipients(public_keys: Sequence[str]) -> list[Any]:
    """Parse age or SSH public keys. Raises BadRequest with the index of an invalid key."""
    if len(public_keys) > RECIPIENTS:
        raise BadRequest(f"There are {len(public_keys)} age_encryption_recipients.", f"Give at most {RECIPIENTS}.")
    return [_recipient(index, text.strip()) for index, text in enumerate(public_keys)]


def _recipient(index: int, text: str) -> Any:
    kind = pyrage.ssh.Recipient if text.startswith("ssh-") else pyrage.x25519.Recipient
    try:
        return kind.from_str(text)
    except pyrage.RecipientError as error:
        raise BadRequest(
            f"age_encryption_recipients[{index}] is not an age or SSH public key: {error}.",
            "Give age1… (print it with age-keygen -y), ssh-ed25519 … or ssh-rsa ….",
        ) from error


def encrypt(plain: Path, to: Path, public_keys: Sequence[str]) -> int:
    """Encrypt every file of `plain` to NAME.age in the folder `to`, which is created atomically.

    Returns the size of `to` in bytes.
    """
    keys = recipients(public_keys)
    with atomic_folder(to) as part:
        for file in sorted(plain.iterdir()):
            pyrage.encrypt_file(str(file), str(part / f"{file.name}.age"), keys)
        return folder_size(part)
