"""The settings of a run: `fields.py` has the keys of a run file, `checks.py` the checks across its sections."""

from tinsmith.rl.config.run_config import RunConfig

__all__ = ["RunConfig"]
