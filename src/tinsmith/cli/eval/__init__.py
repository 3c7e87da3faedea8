"""The command `tinsmith eval`."""
