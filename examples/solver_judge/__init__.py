"""Solvers and a judge that learn together: natively, and under the names of rLLM."""
