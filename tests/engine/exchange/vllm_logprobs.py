"""Prints the logprobs that vLLM gives a prompt: vllm_logprobs.py MODEL ADAPTER TOKENS. For its venv."""

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    model, adapter, tokens = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    lora = {"enable_lora": True, "max_lora_rank": 16, "max_loras": 1} if adapter else {}
    llm = LLM(model, dtype="float32", enforce_eager=True, max_model_len=128, kv_cache_memory_bytes=1 << 28, **lora)
    request = LoRARequest("a", 1, adapter) if adapter else None
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": tokens}], params, lora_request=request)
    logprobs = [next(iter(each.values())).logprob for each in output.prompt_logprobs[1:]]
    print("logprobs", json.dumps(logprobs))


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
