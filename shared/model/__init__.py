"""Runs parts of a frozen Hugging Face causal LM.

Letters used in shapes throughout neap: `B` rows of a batch, `Q` tokens per row in one pass, `T` tokens of a ragged
batch, `S` token positions of a KV cache, `D` hidden size, `V` vocabulary size, `L` decoder layers, `H` attention heads.
A *state at depth d* is the hidden state that enters layer d, so depth 0 is the embedding and depth L the state before
the final norm.
"""
