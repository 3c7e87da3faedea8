"""The service with a faster clock of retention: it looks for what is over every other second, not every ten minutes.

`python -m benchmarks.endurance.accelerated` takes its settings as `tinsmith.service.embedded` does.
"""

from __future__ import annotations

import sys

from tinsmith.service import embedded, sessions
from tinsmith.service.observability import audit
from tinsmith.service.storage import retention

KEEP_S = 4.0
"""Time that results and the records of what has ended stay."""


def main() -> int:
    """Entry point of the server process."""
    sessions.PRUNE_S = sessions.CLEANUP_S = KEEP_S / 2
    audit.PRUNE_S = KEEP_S / 2
    retention.UNFETCHED_S = audit.USAGE_S = audit.KEEP_SPANS_S = KEEP_S
    return embedded.main()


if __name__ == "__main__":
    sys.exit(main())
