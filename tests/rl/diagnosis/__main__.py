"""Record runs: python -m tests.rl.diagnosis [NAME … | FOLDER …]

A name is one of CASES; a folder is that of a run of a model, recorded under the folder's name. Without arguments, all
of CASES.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.rl.diagnosis.cases import CASES, record, recorded

RUNS = Path(__file__).parent / "runs"


def main(names: list[str]) -> None:
    """Write runs/NAME.json of each."""
    RUNS.mkdir(exist_ok=True)
    for name in names or list(CASES):
        if name in CASES:
            with tempfile.TemporaryDirectory() as folder:
                _write(name, record(name, Path(folder)))
        else:
            _write(Path(name).name.replace("-", "_"), recorded(Path(name)))


def _write(name: str, values: dict[str, Any]) -> None:
    text = json.dumps(values, indent=0)
    (RUNS / f"{name}.json").write_text(re.sub(r"\[[^]\[]*\]", lambda part: "".join(part[0].split("\n")), text) + "\n")


main(sys.argv[1:])
