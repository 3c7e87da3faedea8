"""Measurements against the common ways of doing the same work, side by side in one run."""

import os

from tinsmith.engine.processes.slots import WAITING_THREADS

# As the service's engines run, and before torch is imported.
for name, value in WAITING_THREADS.items():
    os.environ.setdefault(name, value)
