"""End-to-end tests: servers in their own processes, unmodified clients, real models."""
