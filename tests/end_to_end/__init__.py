"""Whole programs: servers in processes of their own, unmodified clients, real models."""
