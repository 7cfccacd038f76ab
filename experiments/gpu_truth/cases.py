"""The train steps that one GPU runs: every model of `models/`, at published sizes where they fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from models import Case, get, get_config, gpt, llama, moe

_LLAMA_1B = llama.Config(
    n_layers=16, dim=2048, n_heads=32, n_kv_heads=8, hidden_dim=8192, vocab_size=128256, seq_len=2048,
    batch_size=4, scan_layers=True, remat=True,
)  # fmt: skip
_BLOCK: dict[str, Any] = {"dim": 1024, "vocab_size": 8192, "seq_len": 512, "batch_size": 32, "scan_layers": True}
_LLAMA_BLOCK = llama.Config(n_layers=4, n_heads=16, n_kv_heads=8, hidden_dim=2816, **_BLOCK)


def _case(name: str, model: str, config: Any, what: str, **changes: Any) -> Case:
    """`config`: of the model, or its name among the model's `CONFIGS`."""
    found = get_config(model, config) if isinstance(config, str) else config
    return Case(name=name, model=get(model), config=replace(found, **changes), what=what)


CASES = {
    case.name: case
    for case in (
        _case("gpt2", "gpt", "gpt2", "GPT-2, 8 x 1024 tokens", batch_size=8),
        _case("gpt2-scan", "gpt", "gpt2-scan", "GPT-2 in a scan, 16 x 1024 tokens", batch_size=16),
        _case("gpt2-medium", "gpt", "gpt2-medium", "GPT-2 medium, 8 x 1024 tokens, scan and remat",
              batch_size=8, scan_layers=True, remat=True),
        _case("gpt-block", "gpt", gpt.Config(n_layers=8, n_heads=8, **_BLOCK),
              "GPT, 8 layers, d 1024, 32 x 512 tokens"),
        _case("llama-block", "llama", _LLAMA_BLOCK, "Llama, 4 layers, d 1024, 32 x 512 tokens"),
        _case("llama-1b", "llama", _LLAMA_1B, "Llama 3.2 1B's sizes, 4 x 2048 tokens, remat"),
        _case("moe-block", "moe",
              moe.Config(n_layers=4, n_heads=8, n_kv_heads=8, head_dim=128, hidden_dim=2048, n_experts=8, top_k=2,
                         **_BLOCK), "Mixture of 8 experts, top 2, 4 layers, d 1024, 32 x 512 tokens"),
        _case("vit-b16", "vit", "vit-b16", "ViT-B/16, 64 images of 224 x 224", batch_size=64),
        _case("vit-l16", "vit", "vit-l16", "ViT-L/16 in a scan, 64 images of 224 x 224", batch_size=64,
              scan_layers=True),
        _case("resnet18", "resnet", "resnet18", "ResNet-18, 256 images of 224 x 224", batch_size=256),
        _case("resnet50", "resnet", "resnet50", "ResNet-50, 128 images of 224 x 224", batch_size=128),
        _case("wide-resnet50", "resnet", "wide-resnet50-2", "Wide ResNet-50-2, 64 images of 224 x 224",
              batch_size=64),
        _case("alexnet", "alexnet", "alexnet", "AlexNet, 512 images of 224 x 224", batch_size=512),
        _case("vgg16", "vgg", "vgg16", "VGG-16, 64 images of 224 x 224", batch_size=64),
        _case("inception", "inception", "inception-v3", "Inception-v3, 64 images of 299 x 299",
              batch_size=64),
        _case("unet-cifar", "unet", "ddpm-cifar10", "DDPM's U-Net, 128 images of 32 x 32"),
        _case("lstm-ptb", "lstm", "ptb-large", "LSTM, Penn Treebank, large"),
        _case("nmt", "nmt", "flexflow", "LSTM translator of FlexFlow, 256 x 20 words", batch_size=256),
        _case("mlp-wide", "mlp", "wide-small-batch", "MLP 8192-32768-8192-32768-8192, batch 64"),
        _case("mlp-batch", "mlp", "wide-big-batch", "MLP 8192-8192-8192-8192, batch 32768",
              batch_size=32768),
        _case("t5-base", "t5", "t5-base", "T5 base in a scan, 16 x (512 + 114) tokens, remat", batch_size=16,
              scan_layers=True, remat=True),
        _case("whisper-small", "whisper", "whisper-small",
              "Whisper small, 8 x (3000 frames + 448 tokens), remat", batch_size=8),
        _case("mamba-130m", "mamba", "mamba-130m", "Mamba 130M, 8 x 2048 tokens, remat", batch_size=8),
        _case("dlrm-kaggle", "dlrm", "criteo-kaggle", "DLRM, Criteo Kaggle, batch 16384"),
        _case("gnn-proteins", "gnn", "ogbn-proteins", "GraphSAGE, ogbn-proteins"),
        _case("llama-block-full", "llama", _LLAMA_BLOCK,
              "The Llama of four layers, the largest batch that is planned to fit: 192 x 512 tokens", batch_size=192),
        _case("resnet50-full", "resnet", "resnet50",
              "ResNet-50, the largest batch that is planned to fit: 1264 images", batch_size=1264),
        _case("vit-b16-full", "vit", "vit-b16",
              "ViT-B/16, the largest batch that is planned to fit: 568 images", batch_size=568),
    )
}  # fmt: skip
