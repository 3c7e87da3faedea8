"""vLLM in a process of its own, as its own documentation uses it: `VLLM_PYTHON program.py FOLDER DTYPE [ADAPTER]`.

It is run by an interpreter that has vLLM and not this project, so it imports nothing of it. Each line of its standard
input is a request for samples (`{"prompts": [[ids]], "samples": 8, "tokens": 96}`), under the adapter if there is one;
it answers each with `done` and the number of tokens, and prints `ready` before the first. What vLLM prints goes to
standard error.
"""

import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Loads, then answers until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
        _limit_to_avx2()
    from vllm import LLM, SamplingParams, TokensPrompt  # type: ignore[import-not-found]
    from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]

    folder, dtype, *adapters = sys.argv[1:]
    settings, lora = {}, None
    if adapters:
        rank = json.loads((Path(adapters[0]) / "adapter_config.json").read_text())["r"]
        settings, lora = {"enable_lora": True, "max_lora_rank": rank}, LoRARequest("adapter", 1, adapters[0])
    llm = LLM(model=folder, dtype=dtype, max_model_len=1024, max_num_seqs=256, seed=0, **settings)
    if lora:  # it is loaded with the first request
        llm.generate(
            TokensPrompt(prompt_token_ids=[1]), SamplingParams(max_tokens=1), use_tqdm=False, lora_request=lora
        )
    print("ready", file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        # Without a seed of its own: at one, vLLM (0.32) ends where it computes the prompt in parts.
        fixed = SamplingParams(
            n=request["samples"],
            temperature=1.0,
            max_tokens=request["tokens"],
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
        )
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in request["prompts"]]
        results = llm.generate(prompts, fixed, use_tqdm=False, lora_request=lora)
        print("done", sum(len(output.token_ids) for result in results for output in result.outputs), file=answers)


def _limit_to_avx2() -> None:
    """vLLM chooses its library by the processor's instructions, and not by what PyTorch is limited to."""
    import torch.cpu

    for name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        setattr(torch.cpu, name, lambda: False)


if __name__ == "__main__":
    main()
