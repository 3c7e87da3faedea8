"""Measurements against the common ways of doing the same work, side by side in one run."""

import os

# As the service's engines run, and before torch is imported: threads that wait look for a third of a millisecond and
# then sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
