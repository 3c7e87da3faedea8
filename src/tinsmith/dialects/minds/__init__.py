"""Run files of minds_RL (docs/guides/minds.md)."""
