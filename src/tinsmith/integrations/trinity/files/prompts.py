"""System messages of Trinity's workflows, for tasksets without system_prompt.

R1 is Trinity-RFT's wording to the letter, which follows DeepSeek-R1 (arXiv 2501.12948): a prompt of the same file must
have the same tokens in both systems. The others are Tinsmith's own wording.
"""

R1 = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning "
    "process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e.,\n"
    "<think> reasoning process here </think>\n"
    "<answer> answer here </answer>.\n"
)
BOXED = "Work the problem out step by step, and put the final answer in \\boxed{}."
THINK_BOXED = (
    "First think the problem through between <think> and </think>. Then write the solution, with the final answer in "
    "\\boxed{}."
)
