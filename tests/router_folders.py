"""A small router in a folder, and keys that sign it."""

from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from shared.ladder.artefact import pack_ladder, round_weights
from shared.ladder.confidence_head import ConfidenceHead
from shared.ladder.exit_head import ExitHead
from shared.ladder.exits import LayerExit
from shared.ladder.folder import write_router_folder
from shared.ladder.ladder import Ladder, ModelIdentity
from shared.ladder.table_confidence import fit_table_confidence

FINGERPRINT = "sha256:" + "0" * 64
MODEL = ModelIdentity("tiny", FINGERPRINT, "LlamaForCausalLM", 4, 16, 100)


def write_router(folder: Path, model: ModelIdentity = MODEL) -> Path:
    torch.manual_seed(0)
    layer_exit = LayerExit(2, ExitHead(16, 24), ConfidenceHead(16, 8))
    for module in (layer_exit.head, layer_exit.confidence):
        round_weights(module)
    vocabulary = torch.tensor([1, 5, 99])
    ladder = Ladder(model, fit_table_confidence([], []), exits=(layer_exit,), draft_vocabulary=vocabulary)
    write_router_folder(folder, *pack_ladder(ladder, {}))
    return folder


def write_keys(folder: Path, name: str = "key") -> tuple[Path, Path]:
    """(private, public): PEM files of a new key."""
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public
