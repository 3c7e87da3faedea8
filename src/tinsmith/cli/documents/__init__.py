"""What `--json` of `run`, `check` and `show` prints; docs/reference/json.md has the fields."""
