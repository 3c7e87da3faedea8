"""Configurations of rLLM, translated into a RunConfig key by key.

`schema` lists the keys of `tinker_rl_trainer`, `schema_unified` those of its successor `unified`; both are translated
by the same functions. `config` is for scripts: `read_config` applies overrides in Hydra's syntax to rLLM's defaults,
and `translate` gives the settings of a run.
"""

from __future__ import annotations

from tinsmith.integrations.rllm.files.config import read_config, roles, translate, workflow_args

__all__ = ["read_config", "roles", "translate", "workflow_args"]
