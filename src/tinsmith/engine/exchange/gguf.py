"""GGUF files through llama.cpp's own converter, which knows every architecture that llama.cpp runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tinsmith.errors import ConfigError

CONVERTER = "convert_hf_to_gguf.py"


def find_converter(place: Path | None) -> Path:
    """The converter: at a path, in a folder of llama.cpp, or on PATH. Raises ConfigError if it is not there."""
    if place is not None:
        file = place / CONVERTER if place.is_dir() else place
        if file.is_file():
            return file
        raise ConfigError(f"There is no {file}.", f"--llama-cpp is a checkout of llama.cpp, or its {CONVERTER}.")
    if program := shutil.which(CONVERTER):
        return Path(program)
    raise ConfigError(
        f"{CONVERTER} of llama.cpp is not on PATH.",
        "Give the folder of llama.cpp's sources: --llama-cpp PATH. Or convert a --format merged later.",
    )


def convert(converter: Path, model: Path, to: Path, outtype: str) -> None:
    """Convert a model's folder into a GGUF file. Raises ConfigError with the converter's last lines if it fails."""
    to.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(converter), str(model), "--outfile", str(to), "--outtype", outtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not to.is_file():
        lines = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise ConfigError(
            f"{converter} failed with status {done.returncode}:\n{lines}",
            "It may not know this architecture, or lack a package: try the newest llama.cpp.",
        )
