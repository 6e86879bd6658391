"""One model on several processes, each with a part of its weights: tensor parallelism (Megatron-LM, 1909.08053).

Rank 0 has the engine and everything that chooses tokens. The others follow it: what rank 0's runner is asked for, they
are told in one message per pass, and do the same over their own parts of the weights, keys and values.
"""
