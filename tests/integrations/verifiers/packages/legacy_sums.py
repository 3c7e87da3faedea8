"""An environment of verifiers 0.1 to 0.3: sums over two turns, and a reward that compares the group."""

import verifiers as vf
from datasets import Dataset


class TwoTurns(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Sure?"}]


def exact(completion, answer, **kwargs):
    text = completion[-1]["content"]
    if text == "crash":
        raise OSError("the scorer is gone")
    return float(text == answer)


def length(completion, **kwargs):
    return float(len(completion[-1]["content"]))


def longest(completions, **kwargs):
    lengths = [len(completion[-1]["content"]) for completion in completions]
    return [float(length == max(lengths)) for length in lengths]


def load_environment(turns=1, group=False, size=3):
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1), "info": {"n": n}} for n in range(size)]
    weights = {exact: 1.0, length: 0.0, **({longest: 0.5} if group else {})}
    return TwoTurns(
        dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list([{"question": "7 + 7?", "answer": "14", "info": {"n": 7}}]),
        system_prompt="Reply with the sum.",
        rubric=vf.Rubric(funcs=list(weights), weights=list(weights.values())),
        max_turns=turns,
    )
