"""Shadow steps: what one optimizer step on a copy of the policy would change (docs/research/shadow.md)."""
