"""Register the tasks of the number game Countdown for the classes of `tinsmith.rllm`.

    python examples/countdown/prepare_countdown_data.py [--limit N] [--source hub|generate|auto] [--seed S]

The splits of the dataset `countdown` are train, test, stage2_train and stage3_train. For a run file, use
`tinsmith data countdown`, which writes the same rows as files.
"""

from __future__ import annotations

import argparse

from tinsmith.rl.data.countdown import DATASET, prepare_countdown
from tinsmith.rllm import DatasetRegistry

SPLITS = {"train": "train", "test": "test", "stage2": "stage2_train", "stage3": "stage3_train"}


def main() -> None:
    """Register the splits, and print where the tasks come from."""
    parser = argparse.ArgumentParser(description="Register the tasks of Countdown.")
    parser.add_argument("--source", choices=("auto", "hub", "generate"), default="auto", help="origin of the tasks")
    parser.add_argument("--limit", type=int, help="largest number of rows in each split")
    parser.add_argument("--seed", type=int, default=0, help="seed of stage2, stage3 and generated tasks")
    arguments = parser.parse_args()
    data = prepare_countdown(arguments.source, arguments.limit, arguments.seed)
    if data.reason:
        print(f"{DATASET} is not used: {data.reason}.")
    print(f"Tasks: {DATASET}" if data.origin == "hub" else f"Tasks: generated with seed {arguments.seed}")
    for name, rows in data.splits.items():
        dataset = DatasetRegistry.register_dataset("countdown", rows, SPLITS[name], source=data.origin)
        print(f"countdown/{SPLITS[name]}: {len(dataset)} rows in {dataset.get_data_path()}")


if __name__ == "__main__":
    main()
