"""How a run ends: after its last step, by a condition (`until.py`), or early, to be resumed (`stop.py`)."""
