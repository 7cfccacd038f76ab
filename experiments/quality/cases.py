"""The train steps that are planned and compiled: published sizes where a slice of eight holds them, medium ones else.

Layers are scanned where the model can: a compile's time grows with the program, not with the tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import block

from models import Case, dlrm, gnn, gpt, llama, lstm, mamba, mlp, moe, resnet, t5, unet, vit, whisper

_GPT_BLOCK = gpt.Config(
    n_layers=8, dim=1024, n_heads=8, seq_len=512, batch_size=16, vocab_size=8192, scan_layers=True
)
_MEDIUM_LLAMA = llama.Config(
    n_layers=16, dim=2048, n_heads=32, n_kv_heads=8, hidden_dim=8192, vocab_size=128256, seq_len=4096,
    batch_size=16, scan_layers=True, remat=True,
)  # fmt: skip
_MEDIUM_MOE = moe.Config(
    n_layers=8, dim=2048, n_heads=16, n_kv_heads=8, head_dim=128, hidden_dim=4096, n_experts=8, top_k=2,
    vocab_size=32000, seq_len=1024, batch_size=32, scan_layers=True, remat=True,
)  # fmt: skip

CASES = {
    case.name: case
    for case in (
        Case(name="gpt-block", model=gpt, config=_GPT_BLOCK,
             what="GPT, 8 layers, d 1024, 16 x 512 tokens, Adam"),
        Case(name="block", model=block, config=block.Config(),
             what="Transformer block of XLA AUTO's comparison: 8 layers, d 1024, 16 x 512 tokens, SGD, bf16"),
        Case(name="gpt2-medium", model=gpt, config=replace(gpt.CONFIGS["gpt2-medium"], scan_layers=True),
             what="GPT-2 medium, 64 x 1024 tokens, nothing computed again"),
        Case(name="gpt2-xl", model=gpt, config=gpt.CONFIGS["gpt2-xl"], what="GPT-2 XL, 64 x 1024 tokens, remat"),
        Case(name="llama-1b", model=llama, config=_MEDIUM_LLAMA,
             what="Llama 3.2 1B's sizes, 16 x 4096 tokens, remat"),
        Case(name="llama2-7b", model=llama, config=replace(llama.CONFIGS["llama2-7b"], batch_size=16),
             what="Llama 2 7B, 16 x 4096 tokens, remat"),
        Case(name="moe-8x", model=moe, config=_MEDIUM_MOE,
             what="Mixture of 8 experts, top 2, 8 layers, d 2048, 32 x 1024 tokens, remat"),
        Case(name="vit-l16", model=vit, config=replace(vit.CONFIGS["vit-l16"], scan_layers=True, batch_size=128),
             what="ViT-L/16, 128 images of 224 x 224"),
        Case(name="vit-h14", model=vit, config=vit.CONFIGS["vit-h14"], what="ViT-H/14, 224 x 224, remat"),
        Case(name="resnet50", model=resnet, config=resnet.CONFIGS["resnet50"], what="ResNet-50, 224 x 224"),
        Case(name="lstm-ptb", model=lstm, config=lstm.CONFIGS["ptb-medium"], what="LSTM, Penn Treebank, medium"),
        Case(name="mlp-wide", model=mlp, config=mlp.CONFIGS["wide-small-batch"],
             what="MLP 8192-32768-8192-32768-8192, batch 64"),
        Case(name="mlp-batch", model=mlp, config=mlp.CONFIGS["wide-big-batch"],
             what="MLP 8192-8192-8192-8192, batch 262144"),
        Case(name="gpt2", model=gpt, config=gpt.CONFIGS["gpt2-scan"], what="GPT-2, 64 x 1024 tokens"),
        Case(name="t5-base", model=t5, config=replace(t5.CONFIGS["t5-base"], scan_layers=True, remat=True),
             what="T5 base, 128 x (512 + 114) tokens, remat"),
        Case(name="whisper-small", model=whisper, config=whisper.CONFIGS["whisper-small"],
             what="Whisper small, 256 x (3000 frames + 448 tokens), remat"),
        Case(name="mamba-130m", model=mamba, config=mamba.CONFIGS["mamba-130m"],
             what="Mamba 130M, 256 x 2048 tokens, remat"),
        Case(name="unet-cifar", model=unet, config=unet.CONFIGS["ddpm-cifar10"], what="DDPM's U-Net, CIFAR-10"),
        Case(name="dlrm-kaggle", model=dlrm, config=dlrm.CONFIGS["criteo-kaggle"], what="DLRM, Criteo Kaggle"),
        Case(name="gnn-proteins", model=gnn, config=gnn.CONFIGS["ogbn-proteins"], what="GraphSAGE, ogbn-proteins"),
    )
}  # fmt: skip

_SMALL_BLOCK: dict[str, Any] = {
    "n_layers": 2, "dim": 1024, "vocab_size": 8192, "seq_len": 512, "batch_size": 32, "scan_layers": True,
}  # fmt: skip

SMALL = {
    case.name: case
    for case in (
        Case(name="gpt", model=gpt, config=gpt.Config(n_heads=8, **_SMALL_BLOCK), what="GPT, 2 layers, d 1024"),
        Case(name="llama", model=llama,
             config=llama.Config(n_heads=16, n_kv_heads=8, hidden_dim=2816, **_SMALL_BLOCK),
             what="Llama, 2 layers, d 1024, 16 heads over 8"),
        Case(name="moe", model=moe,
             config=moe.Config(n_heads=8, n_kv_heads=8, head_dim=128, hidden_dim=2048, n_experts=8, top_k=2,
                               **_SMALL_BLOCK),
             what="Mixture of 8 experts, top 2, 2 layers, d 1024"),
        Case(name="mlp", model=mlp,
             config=mlp.Config(input_dim=4096, hidden_dims=(8192, 4096), n_classes=1024, batch_size=8192),
             what="MLP 4096-8192-4096-1024, batch 8192"),
        Case(name="conv", model=resnet, config=replace(resnet.CONFIGS["resnet18"], batch_size=64),
             what="ResNet-18, 64 images of 224 x 224"),
    )
}  # fmt: skip
"""Steps that a compiler finishes in seconds, for many plans each; 32 x 512 tokens."""

_HOST_BLOCK: dict[str, Any] = {
    "n_layers": 2, "dim": 256, "vocab_size": 1024, "seq_len": 128, "batch_size": 16, "scan_layers": True,
    "dtype": "float32",
}  # fmt: skip

HOST = {
    case.name: case
    for case in (
        Case(name="gpt", model=gpt, config=gpt.Config(n_heads=8, **_HOST_BLOCK), what="GPT, 2 layers, d 256, f32"),
        Case(name="llama", model=llama,
             config=llama.Config(n_heads=8, n_kv_heads=4, hidden_dim=704, **_HOST_BLOCK),
             what="Llama, 2 layers, d 256, f32"),
        Case(name="mlp", model=mlp,
             config=mlp.Config(input_dim=512, hidden_dims=(1024, 512), n_classes=64, batch_size=512, dtype="float32"),
             what="MLP 512-1024-512-64, batch 512, f32"),
        Case(name="mlp-wide", model=mlp,
             config=mlp.Config(input_dim=1024, hidden_dims=(2048, 1024), n_classes=64, batch_size=32,
                               dtype="float32"),
             what="MLP 1024-2048-1024-64, batch 32, f32"),
    )
}  # fmt: skip
"""Steps that forced host devices run in tens of milliseconds."""
