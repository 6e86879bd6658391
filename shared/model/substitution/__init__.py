"""neap's kernels and torch.compile under the modules of Hugging Face transformers, whatever the family.

All that knows transformers' classes, its attention interfaces and its modelling files to put something in their place is here;
`shared.ops` knows tensors only.

    match           whether a module computes what a replacement computes: by running both, never by its name
    linear          replacements of linear layers, RMS norms and gated MLPs
    rotary          the replacement of `apply_rotary_pos_emb`
    attention       attention over slots; `paged_attention`: over pages; `packing`: what packed passes hand through
    layer           a decoder layer as one op; `fused_layers`: which layers prove to be one
    compiled        a decoder layer compiled by torch.compile
    apply           does it for a model on a CPU, and reports; `reversible`: how every step is taken back
"""
