"""Weights for use elsewhere: a folder in PEFT's layout, encrypted with age for whoever is to read it.

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
"""At most, as the protocol has it."""


def recipients(given: Sequence[str]) -> list[Any]:
    """The public keys. Raises BadRequest that names the one at fault."""
    if len(given) > RECIPIENTS:
        raise BadRequest(f"{len(given)} age_encryption_recipients are too many.", f"Give at most {RECIPIENTS}.")
    return [_recipient(index, text.strip()) for index, text in enumerate(given)]


def _recipient(index: int, text: str) -> Any:
    kind = pyrage.ssh.Recipient if text.startswith("ssh-") else pyrage.x25519.Recipient
    try:
        return kind.from_str(text)
    except pyrage.RecipientError as error:
        raise BadRequest(
            f"age_encryption_recipients[{index}] is no public key of age or SSH: {error}.",
            "Give age1… (see age-keygen -y), ssh-ed25519 … or ssh-rsa ….",
        ) from error


def encrypt(plain: Path, to: Path, given: Sequence[str]) -> int:
    """Every file of `plain` as NAME.age in `to`, which appears whole or not at all. Returns bytes."""
    keys = recipients(given)
    with atomic_folder(to) as part:
        for file in sorted(plain.iterdir()):
            pyrage.encrypt_file(str(file), str(part / f"{file.name}.age"), keys)
        return folder_size(part)
