"""The Python API under the names of rLLM, so that a file written for it changes its imports and nothing else."""
