"""vLLM in a process of its own, as its own documentation uses it: `VLLM_PYTHON vllm_baseline.py FOLDER DTYPE`.

It is run by an interpreter that has vLLM and not this project, so it imports nothing of it. Each line of its standard
input is a request for samples (`{"prompts": [[ids]], "samples": 8, "tokens": 96, "seed": 1}`); it answers
each with `done` and the number of tokens, and prints `ready` before the first. What vLLM prints goes to standard error.
"""

import json
import os
import sys


def main() -> None:
    """Loads, then answers until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams, TokensPrompt  # type: ignore[import-not-found]

    folder, dtype = sys.argv[1:]
    llm = LLM(model=folder, dtype=dtype, max_model_len=1024, max_num_seqs=256, seed=0)
    print("ready", file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        fixed = SamplingParams(
            n=request["samples"],
            temperature=1.0,
            max_tokens=request["tokens"],
            ignore_eos=True,
            logprobs=0,
            seed=request["seed"],
            detokenize=False,
        )
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in request["prompts"]]
        results = llm.generate(prompts, fixed, use_tqdm=False)
        print("done", sum(len(output.token_ids) for result in results for output in result.outputs), file=answers)


if __name__ == "__main__":
    main()
