"""Record the runs again, after a change that is meant to change them: python -m tests.recorded"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

from tests.recorded.runs import CASES, record

FOLDER = Path(__file__).parent


def main() -> None:
    """Write NAME.json of each case."""
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            text = json.dumps(record(name, Path(folder)), indent=1)
        (FOLDER / f"{name}.json").write_text(
            re.sub(r"\[[^]]*\]", lambda values: " ".join(values[0].split()), text) + "\n"
        )


if __name__ == "__main__":
    main()
