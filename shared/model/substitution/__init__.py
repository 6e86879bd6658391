"""neap's kernels and torch.compile under the modules of Hugging Face transformers, whatever the family.

All code that depends on transformers' classes, attention interfaces and modelling files in order to replace them is
here. `shared.ops` works with tensors only.

    match           runs a module and its replacement on random input and compares the results
    linear          replacements of linear layers, norms and gated MLPs
    experts         the replacements of routers, and of experts that are stored in one parameter
    row_invariant   makes torch's own functions inside modules give a row the same bits whatever is beside it
    rotary          the replacement of `apply_rotary_pos_emb`
    attention       attention over contiguous KV caches; `paged_attention`: over paged KV; `ragged`: what ragged
                    batches pass through
    layer           a decoder layer as one op; `fused_layers`: finds the layers that can be one
    compiled        a decoder layer compiled by torch.compile
    apply           replaces the modules of a model on a CPU, and reports; `reversible`: undoes every step
"""
