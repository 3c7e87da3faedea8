"""Training and evaluation of the solver-judge workflow, as scripts of rLLM."""
