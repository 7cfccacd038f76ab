"""The train steps that the judge compiles.

Small enough for a TPU compile in a minute or two, large enough to be bound by what binds the published sizes.
"""

from __future__ import annotations

from models import Case, gpt, llama, mlp, moe, vit

CASES = (
    Case(
        name="gpt",
        model=gpt,
        config=gpt.Config(
            n_layers=8, dim=1024, n_heads=8, seq_len=512, batch_size=16, vocab_size=8192, scan_layers=True
        ),
        what="GPT, 8 scanned layers, d 1024, ff 4096, 8 heads, 16 x 512 tokens, vocabulary 8192",
    ),
    Case(
        name="gpt-remat",
        model=gpt,
        config=gpt.Config(
            n_layers=8,
            dim=1024,
            n_heads=16,
            seq_len=1024,
            batch_size=32,
            vocab_size=32768,
            scan_layers=True,
            remat=True,
        ),
        what="GPT, 8 scanned layers with remat, d 1024, ff 4096, 16 heads, 32 x 1024 tokens, "
        "vocabulary 32768",
    ),
    Case(
        name="llama",
        model=llama,
        config=llama.Config(
            n_layers=8,
            dim=1024,
            n_heads=16,
            n_kv_heads=8,
            hidden_dim=2816,
            vocab_size=32000,
            seq_len=1024,
            batch_size=16,
            scan_layers=True,
            remat=True,
        ),
        what="Llama, 8 scanned layers with remat, d 1024, ff 2816, 16 heads over 8, 16 x 1024 tokens, "
        "vocabulary 32000",
    ),
    Case(
        name="moe",
        model=moe,
        config=moe.Config(
            n_layers=4,
            dim=1024,
            n_heads=8,
            n_kv_heads=8,
            head_dim=128,
            hidden_dim=2048,
            n_experts=8,
            top_k=2,
            vocab_size=8192,
            seq_len=512,
            batch_size=16,
            scan_layers=True,
        ),
        what="Mixture of 8 experts, top 2, 4 scanned layers, d 1024, ff 2048, 16 x 512 tokens, "
        "vocabulary 8192",
    ),
    Case(
        name="vit",
        model=vit,
        config=vit.Config(
            n_layers=8, dim=768, n_heads=12, hidden_dim=3072, patch_size=16, batch_size=128, scan_layers=True
        ),
        what="ViT, 8 scanned layers, d 768, ff 3072, 12 heads, 128 images of 224 x 224 in patches of 16",
    ),
    Case(
        name="mlp-wide",
        model=mlp,
        config=mlp.Config(
            input_dim=4096, hidden_dims=(16384, 4096, 16384, 4096), n_classes=1024, batch_size=64
        ),
        what="MLP 4096-16384-4096-16384-4096-1024, batch 64",
    ),
    Case(
        name="mlp-batch",
        model=mlp,
        config=mlp.Config(input_dim=2048, hidden_dims=(2048, 2048, 2048), n_classes=1024, batch_size=65536),
        what="MLP 2048-2048-2048-2048-1024, batch 65536",
    ),
)
