"""Write a random model of GPT-OSS's form, big enough to measure: 8 layers, 32 experts (4 a token), hidden size 512.

    pip install -e '.[fixtures]'
    python tests/benchmarks/gpt_oss_like.py model.onnx [float16]

Needs about 4 GB of memory; the file has 0.9 GB in float32.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from fixtures.makers.architectures import Decoder, axes, built, token_samples
from fixtures.makers.record import Case, export, present_names

LAYERS, KV_HEADS, HEAD_SIZE = 8, 2, 16


def main(path: Path, dtype: torch.dtype) -> None:
    model = built(
        "gpt_oss",
        "eager",
        dtype,
        "batched_mm",
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        num_local_experts=32,
        num_experts_per_tok=4,
        max_position_embeddings=2048,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
    )
    samples = token_samples(LAYERS, KV_HEADS, True, dtype)
    case = Case(Decoder(model), samples, ["logits", *present_names(LAYERS)], axes(LAYERS))
    with torch.no_grad():
        export(case, path, "dynamo", 18)


if __name__ == "__main__":
    main(Path(sys.argv[1]), getattr(torch, sys.argv[2] if len(sys.argv) > 2 else "float32"))
