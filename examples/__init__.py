"""Examples. An editable install makes them importable: `from examples.solver_judge.solver_judge_flow import …`."""
