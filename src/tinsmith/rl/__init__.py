"""The harness: from tasks to better weights, through any server of the Tinker API."""
