"""The command `tinsmith chat`: a conversation with a model, the weights of a run or a checkpoint."""
