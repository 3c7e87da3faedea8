"""Trains a small model by both of Trinity-RFT's files and two of ours, and draws the curves: `make gsm8k DATA=FOLDER`.

DATA holds GSM8K as train.jsonl and test.jsonl. tinker.yaml goes through a server of the Tinker API, which serves
SmolLM2 under the name that the file has; verl.yaml through the run's own service. Neither file is changed: what is
laid on top fits them to a small machine. A run that is there already is gone on with, or left as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NAMED = "meta-llama/Llama-3.2-3B"
TRAINED = "HuggingFaceTB/SmolLM2-135M-Instruct"
FILES = {
    "tinker": "the Tinker file, through a served Tinker API",
    "verl": "the verl file (LoRA), through the run's own service",
    "smollm2": "our file: a strict form",
    "arithmetic": "our file: one-digit sums and differences",
}
BOTH, ALONE = ("tinker", "verl"), ("smollm2", "arithmetic")


def main() -> None:
    """All runs, then pictures and a table in the folder `--out`."""
    arguments = _arguments()
    out = arguments.out.resolve()
    _lay_data(arguments.data, out / "openai" / "gsm8k")
    for name in arguments.only or FILES:
        _train(name, out, arguments)
    rows = {name: _rows(out / name) for name in FILES if (out / name / "metrics.jsonl").is_file()}
    _draw({name: rows[name] for name in BOTH if name in rows}, out / "gsm8k.png", "Training reward on GSM8K")
    for name in ALONE:
        _draw({name: rows[name]} if name in rows else {}, out / f"{name}.png", FILES[name].partition(": ")[2])
    (out / "numbers.md").write_text(_table(rows))
    print(f"{out}/gsm8k.png, {out}/numbers.md\n\n{_table(rows)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="a folder with train.jsonl and test.jsonl")
    parser.add_argument("--out", type=Path, default=Path("runs/gsm8k"), help="runs, pictures and numbers")
    parser.add_argument("--only", nargs="+", choices=list(FILES), help="these runs")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=6, help="tasks in a step, on GSM8K")
    parser.add_argument("--size", type=int, default=8, help="answers to each task")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an answer")
    parser.add_argument(
        "--rate", type=float, default=3e-4, help="learning rate of Trinity's files; so few steps want more"
    )
    return parser.parse_args()


def _lay_data(data: Path, folder: Path) -> None:
    """GSM8K as the hub has it: a folder with the subset `main`."""
    (folder / "main").mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        shutil.copyfile(data / f"{split}.jsonl", folder / "main" / f"{split}.jsonl")
    splits = "".join(f"  - split: {split}\n    path: main/{split}.jsonl\n" for split in ("train", "test"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{splits}---\n")


def _train(name: str, out: Path, arguments: argparse.Namespace) -> None:
    """One run in the folder `out`/`name`."""
    overrides = [f"steps={arguments.steps}", f"folder={out / name}"]
    if name != "arithmetic":
        overrides += [
            f"groups_per_step={arguments.groups}",
            f"group_size={arguments.size}",
            f"sampling.max_tokens={arguments.max_tokens}",
        ]
    if name in BOTH:
        overrides += [
            f"optimizer.learning_rate={arguments.rate}",
            "model.chat_template=''",  # the files bring Llama's; this is another model
        ]
    environment = {**os.environ, "WANDB_MODE": "offline"}
    for server in ("TINKER_BASE_URL", "TINKER_API_KEY"):
        environment.pop(server, None)
    with _served(out / "served") if name == "tinker" else nullcontext() as served:
        if served:
            environment |= {"TINKER_BASE_URL": served[0], "TINKER_API_KEY": served[1]}
        elif name == "verl":
            overrides.append(f"service.source={TRAINED}")
        command = [sys.executable, "-m", "tinsmith", "run", "--config", str((HERE / f"{name}.yaml").resolve())]
        print(f"\n{FILES[name]}\n", flush=True)
        subprocess.run([*command, *overrides], cwd=out, env=environment, check=True)


def _served(data: Path) -> Any:
    """As `tinsmith serve --model NAMED=TRAINED`: (url, key) for as long as the block runs."""
    from tinsmith.service.config import ServeConfig
    from tinsmith.service.embedded import embedded

    return embedded(ServeConfig(models=(f"{NAMED}={TRAINED}",), data=data))


def _rows(folder: Path) -> list[dict[str, float]]:
    """A row for each step so far."""
    rows: dict[int, dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["step"], {}).update(row)
    return [rows[step] for step in sorted(rows)]


def _draw(curves: dict[str, list[dict[str, float]]], target: Path, title: str) -> None:
    """Each run's mean reward by step, thin as it was and thick smoothed."""
    if not curves:
        return
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
    for color, (name, rows) in zip(("tab:blue", "tab:orange"), curves.items(), strict=False):
        points = [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row]
        steps, values = [step for step, _ in points], [value for _, value in points]
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=1)
        axes.plot(steps, _smooth(values), color=color, linewidth=2, label=FILES[name])
    for color, (name, values) in zip(("tab:green", "tab:purple"), _held_out(curves), strict=False):
        axes.plot(*zip(*values, strict=True), "o--", color=color, label=f"held out: {name}")
    axes.set(title=title, xlabel="step", ylabel="mean reward")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target, dpi=120)
    pyplot.close(figure)


def _held_out(curves: dict[str, list[dict[str, float]]]) -> list[tuple[str, list[tuple[float, float]]]]:
    """Right answers to held-out tasks, greedy, where one run is drawn alone."""
    if len(curves) > 1:
        return []
    (rows,) = curves.values()
    found = [(row["step"], row["eval/pass@1"]) for row in rows if "eval/pass@1" in row]
    return [("share right", found)] if found else []


def _smooth(values: Sequence[float], window: int = 5) -> list[float]:
    """The mean of up to `window` values that end here."""
    return [sum(part := values[max(0, at - window + 1) : at + 1]) / len(part) for at in range(len(values))]


def _table(rows: dict[str, list[dict[str, float]]]) -> str:
    """First and last, as markdown."""
    lines = [
        "| run | steps | reward, first 5 steps | reward, last 5 steps | held out right, before | after |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in rows.items():
        rewards = [row["reward/mean"] for row in found if "reward/mean" in row]
        held_out = [f"{row['eval/pass@1']:.3f}" for row in found if "eval/pass@1" in row] or ["-"]
        ends = [f"{sum(part) / len(part):.3f}" for part in (rewards[:5], rewards[-5:]) if part]
        lines.append(f"| {FILES[name]} | {len(rewards)} | {' | '.join(ends)} | {held_out[0]} | {held_out[-1]} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
