"""Half an hour with one GPU: `python -m benchmarks.gpu_check` (`make gpu-check`).

Fourteen steps, each in a process with a time limit of its own, so that a step which fails, hangs or dies takes no other
with it. It runs on an image with PyTorch, transformers and PEFT and the wheels of `requirements.txt` beside this file.
`--tiny` runs the same steps with small shapes on a CPU, where the figures mean nothing.
"""
