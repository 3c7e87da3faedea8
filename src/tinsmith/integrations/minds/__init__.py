"""minds_RL: its run files, and the environments of introspection (docs/from/minds.md)."""
