"""Run files of minds_RL (docs/from/minds.md)."""
