"""Train a small model with two files of Trinity-RFT and two of Tinsmith, and draw charts: `make gsm8k DATA=FOLDER`.

DATA holds GSM8K as train.jsonl and test.jsonl. tinker.yaml uses a server of the Tinker API, which serves SmolLM2 under
the name in the file; verl.yaml uses a service that the run starts. The files stay unchanged; overrides fit them to a
small machine. Existing runs continue, and finished ones are left as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from curves import FILES, draw_all, report

from tinsmith.terminal import TRAINED_NOTHING

HERE = Path(__file__).resolve().parent
SERVED_NAME = "meta-llama/Llama-3.2-3B"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
HELD_OUT = {
    "type": "hub", "name": "openai/gsm8k", "subset": "main", "split": "test",
    "prompt": "{question}", "answer": "{answer}",
}  # fmt: skip
EVAL = {"every": 0}


def main() -> None:
    """Train all runs, then write pictures and numbers to the folder `--out`."""
    arguments = _arguments()
    out = arguments.out.resolve()
    _copy_data(arguments.data, out / "openai" / "gsm8k")
    for name in arguments.only or FILES:
        _train(name, out, arguments)
    draw_all(out)
    numbers = report(out)
    (out / "numbers.md").write_text(numbers)
    print(f"\n{numbers}\nPictures, this and the runs: {out}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="a folder with train.jsonl and test.jsonl")
    parser.add_argument("--out", type=Path, default=Path("runs/gsm8k"), help="runs, pictures and numbers")
    parser.add_argument("--only", nargs="+", choices=list(FILES), help="these runs")
    parser.add_argument("--model", default=MODEL, help="the model to train: a hub id or a folder")
    parser.add_argument("--steps", type=int, default=24, help="reinforcement steps on GSM8K")
    parser.add_argument("--sft-steps", type=int, default=12, help="supervised steps before them, on GSM8K")
    parser.add_argument("--groups", type=int, default=4, help="tasks of a step, on GSM8K")
    parser.add_argument("--size", type=int, default=8, help="replies to each task, on GSM8K")
    parser.add_argument("--max-tokens", type=int, default=88, help="tokens of a reply, on GSM8K")
    parser.add_argument("--sums", type=int, default=40, help="steps of arithmetic.yaml")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate: few steps need more than 1e-5")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of every run")
    return parser.parse_intermixed_args()  # overrides may follow options


def _copy_data(data: Path, folder: Path) -> None:
    """Write GSM8K in the hub's layout: a folder with the subset `main`."""
    (folder / "main").mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        if not (data / f"{split}.jsonl").is_file():
            sys.exit(f"There is no {data}/{split}.jsonl. Give the folder that has GSM8K: make gsm8k DATA=FOLDER")
        shutil.copyfile(data / f"{split}.jsonl", folder / "main" / f"{split}.jsonl")
    splits = "".join(f"  - split: {split}\n    path: main/{split}.jsonl\n" for split in ("train", "test"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{splits}---\n")


def _train(name: str, out: Path, arguments: argparse.Namespace) -> None:
    """Train one run in the folder `out`/`name`."""
    environment = {**os.environ, "WANDB_MODE": "offline"}
    for server in ("TINKER_BASE_URL", "TINKER_API_KEY", "TRINITY_API_KEY"):
        environment.pop(server, None)
    with _served(out / "served", arguments.model) if name == "tinker" else nullcontext() as served:
        if served:
            environment |= {"TINKER_BASE_URL": served[0], "TINKER_API_KEY": served[1]}
        command = [sys.executable, "-m", "tinsmith", "run", "--config", str(HERE / f"{name}.yaml")]
        overrides = [f"folder={out / name}", *_small_machine_overrides(name, arguments), *arguments.overrides]
        print(f"\n{FILES[name]}\n", flush=True)
        done = subprocess.run([*command, *overrides], cwd=out, env=environment, check=False)
        if done.returncode != TRAINED_NOTHING:  # its picture shows that
            done.check_returncode()


def _small_machine_overrides(name: str, arguments: argparse.Namespace) -> list[str]:
    """Overrides that fit a file to a small machine."""
    if name == "arithmetic":
        return [f"steps={arguments.sums}", f"model.name={arguments.model}"]
    sizes = [
        f"groups_per_step={arguments.groups}",
        f"group_size={arguments.size}",
        f"sampling.max_tokens={arguments.max_tokens}",
    ]
    if name == "smollm2":
        steps = [f"stages.0.steps={arguments.sft_steps}", f"stages.1.steps={arguments.steps}"]
        by = [
            f"stages.0.demonstrations.data.operators.{at}.by={HERE}/rows.py:{function}"
            for at, function in enumerate(("is_short", "marked"))
        ]
        return [*sizes, *steps, *by, f"model.name={arguments.model}"]
    return [
        *sizes,
        f"steps={arguments.steps}",
        f"optimizer.learning_rate={arguments.rate}",
        "checkpoint.every=8",  # the files' 100 is more than the run has
        "model.chat_template=''",  # the files bring Llama's; this is another model
        f"tasks.eval={json.dumps(HELD_OUT)}",  # the files evaluate nothing
        "tasks.held_out=64",
        f"eval={json.dumps(EVAL)}",
        f"stages={json.dumps(_stages(arguments.sft_steps))}",
        *([f"service.source={arguments.model}"] if name == "verl" else []),
    ]


def _stages(sft_steps: int) -> list[dict[str, Any]]:
    """A supervised stage on short solutions in the format of Trinity's math workflow, then the run of the file."""
    from tinsmith.rl.workflows.single_turn import THINK

    rows = {
        "type": "jsonl",
        "path": "openai/gsm8k/main/train.jsonl",
        "system": THINK,
        "prompt": "{question}",
        "reply": "{reply}",
        "operators": [
            {"type": "filter", "by": f"{HERE}/rows.py:is_short"},
            {"type": "map", "by": f"{HERE}/rows.py:tagged"},
        ],
    }
    first = {
        "name": "sft",
        "algorithm": {"type": "sft"},
        "demonstrations": {"data": rows, "per_step": 16},
        "steps": sft_steps,
        "optimizer": {"learning_rate": 5e-4, "warmup_steps": 2},
        "eval": {**EVAL, "after": False},  # the next stage begins with this evaluation
    }
    return [first, {"name": "rewarded"}]


def _served(data: Path, model: str) -> Any:
    """(url, key) of a service of `model` under the name SERVED_NAME; it ends with the block."""
    from tinsmith import ServeConfig, embedded

    return embedded(ServeConfig(models=(f"{SERVED_NAME}={model}",), data=data))


if __name__ == "__main__":
    main()
