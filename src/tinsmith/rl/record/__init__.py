"""What a run records: metrics, rollouts, the timeline, logs, comparisons of evaluations, and the monitors."""
