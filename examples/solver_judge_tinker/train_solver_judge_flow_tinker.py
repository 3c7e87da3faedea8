"""Train the solver-judge workflow on Countdown. train_solver_judge_flow_tinker.sh has the settings.

The tasks are those of examples/countdown/prepare_countdown_data.py.
"""

from __future__ import annotations

from omegaconf import DictConfig

from examples.solver_judge.solver_judge_flow import SolverJudgeWorkflow
from tinsmith.rllm import AgentTrainer, countdown_reward_fn, hydra


@hydra.main(config_path="pkg://rllm.trainer.config", config_name="tinker_rl_trainer", version_base=None)
def main(config: DictConfig) -> None:
    """Train, or resume the run in the folder of the configuration."""
    result = AgentTrainer(
        config=config,
        workflow_class=SolverJudgeWorkflow,
        workflow_args={"n_solutions": 2, "reward_function": countdown_reward_fn},
        train_dataset="countdown/train",
        val_dataset="countdown/test",
        backend="tinker",
    ).train()
    print(f"{result.step} steps; weights to sample from: {result.sampling_path}")


if __name__ == "__main__":
    main()
