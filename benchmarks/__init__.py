"""Measurements against the common ways of doing the same work, side by side in one run."""

import os

# As the service's engines run, and before torch is imported: threads that wait sleep, so that whatever else the
# machine does disturbs both sides less.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
