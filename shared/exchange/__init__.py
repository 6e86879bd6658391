"""How routers travel between registries: as folders, over the Hugging Face Hub and over OCI registries, signed or not.

These are transports. What serves is in a registry (`shared.registry`), and nothing here is one.
"""
