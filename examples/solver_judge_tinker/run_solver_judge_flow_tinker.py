"""Run the solver-judge workflow on Countdown without training, and print pass@1 and pass@k.

python -m examples.solver_judge_tinker.run_solver_judge_flow_tinker --attempts 4 --limit 100
python -m examples.solver_judge_tinker.run_solver_judge_flow_tinker --weights tinker://…/sampler_weights/final
"""

from __future__ import annotations

import argparse
import asyncio
import json
from contextlib import suppress
from pathlib import Path

import tinker

from examples.solver_judge.solver_judge_flow import SolverJudgeWorkflow
from tinsmith.rllm import (
    AgentWorkflowEngine,
    DatasetRegistry,
    Episode,
    TinkerEngine,
    countdown_reward_fn,
    mean_metrics,
    pass_metrics,
)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Evaluate the solver-judge workflow on Countdown.")
    parser.add_argument("--model", default="Qwen/Qwen3-4B-Instruct-2507", help="base model")
    parser.add_argument("--weights", help="tinker:// path of weights to sample; default: the base model")
    parser.add_argument("--base-url", help="server; default: TINKER_BASE_URL, else the hosted service")
    parser.add_argument("--split", default="test", help="split of the dataset countdown")
    parser.add_argument("--limit", type=int, default=100, help="number of tasks")
    parser.add_argument("--attempts", type=int, default=1, help="rollouts of each task")
    parser.add_argument("--solutions", type=int, default=2, help="solvers of a rollout")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--parallel", type=int, default=128, help="rollouts at the same time")
    parser.add_argument("--seed", type=int, help="seed of the replies")
    parser.add_argument("--out", type=Path, help="file for the episodes, as JSON Lines")
    return parser.parse_args()


async def main(words: argparse.Namespace) -> None:
    """Run all tasks, and print the metrics."""
    dataset = DatasetRegistry.load_dataset("countdown", words.split)
    if dataset is None:
        raise SystemExit("The tasks are not registered: run examples/countdown/prepare_countdown_data.py first.")
    tasks = dataset.select(range(min(words.limit, len(dataset)))).repeat(words.attempts)
    service = tinker.ServiceClient(**({"base_url": words.base_url} if words.base_url else {}))
    engine = TinkerEngine(
        model_name=words.model,
        service_client=service,
        max_prompt_length=2048,
        max_response_length=words.max_tokens,
        sampling_params={"temperature": words.temperature, "top_p": 1.0},
        seed=words.seed,
    )
    if words.weights:
        engine.set_sampling_client(await service.create_sampling_client(model_path=words.weights))
    workflows = AgentWorkflowEngine(
        workflow_cls=SolverJudgeWorkflow,
        workflow_args={"n_solutions": words.solutions, "reward_function": countdown_reward_fn},
        rollout_engine=engine,
        n_parallel_tasks=words.parallel,
    )
    ids = [str(number // words.attempts) for number in range(len(tasks))]
    report(await workflows.execute_tasks(tasks, ids), words.out)
    with suppress(TimeoutError):  # on Python 3.11 close() rarely waits for ever (docs/not-learning.md)
        async with asyncio.timeout(30):
            await service.close("success")


def report(episodes: list[Episode], out: Path | None) -> None:
    """Print the metrics, and write the episodes to `out`."""
    for name, value in {**pass_metrics(episodes), **mean_metrics(episodes)}.items():
        print(f"{name}: {value:.4f}")
    if out is not None:
        out.write_text("".join(json.dumps(episode.to_dict()) + "\n" for episode in episodes))


if __name__ == "__main__":
    asyncio.run(main(parse()))
