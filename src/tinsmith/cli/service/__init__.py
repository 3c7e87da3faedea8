"""Commands of a service that runs or has run: keys, tenants, backups, checkpoints."""
