"""The program that runs one benchmark of a run: `python -m tinsmith.rl.evaluation.program`.

It reads its request, JSON, from the file that the variable REQUEST_FILE names, and writes scores or an error to the
file that the request names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tinsmith.atomic import atomic_write
from tinsmith.errors import UserError
from tinsmith.rl.evaluation import libraries
from tinsmith.rl.evaluation.endpoint import PROGRAM_ERRORS, REQUEST_FILE, Endpoint, Sampling
from tinsmith.rl.evaluation.scores import to_json


def main() -> None:
    """Run the benchmark of the request."""
    request = json.loads(Path(os.environ[REQUEST_FILE]).read_bytes())
    endpoint, sampling = request["endpoint"], request["sampling"]
    endpoint["tokenizer"] = Path(endpoint["tokenizer"])
    sampling["include"] = Path(sampling["include"]) if sampling["include"] else None
    result: dict[str, Any]
    try:
        result = {"scores": libraries.run(request["name"], Endpoint(**endpoint), Sampling(**sampling))}
    except UserError as error:
        kind = next(each for each in PROGRAM_ERRORS if isinstance(error, each))
        result = {"error": kind.__name__, "message": error.message, "hint": error.hint}
    atomic_write(Path(request["result"]), to_json(result))


if __name__ == "__main__":
    main()
