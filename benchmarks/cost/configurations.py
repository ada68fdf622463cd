"""Language models from their configurations: parameters beside transformers' own count, layers, and the time it took.

    python benchmarks/cost/configurations.py [--only NAME,NAME] [--out benchmarks/results/<date>_configurations.md]

A row is one family: its sizes as published where they are written below, else transformers' defaults. *Parameters* are
those of the estimate; transformers' own count is of the model on torch's meta device. Seconds are CPU time of one
process, its imports apart. Left out are families whose recurrence is a Python loop over tokens where no kernel is
installed (Jamba, Falcon-Mamba, RecurrentGemma): their step is recorded token by token, which takes minutes.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
import warnings
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autoprec.cost.configuration import config_report
from autoprec.errors import AutoPrecError

#: model_type -> sizes, as the model of the comment was published; {}: transformers' defaults of the family.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    # dense
    "llama": {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
              "intermediate_size": 28672, "vocab_size": 128256},  # Llama-3 70B
    "qwen2": {}, "qwen3": {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "head_dim": 128,
                           "num_key_value_heads": 8, "intermediate_size": 12288, "vocab_size": 151936},  # Qwen3-8B
    "mistral": {}, "gpt2": {}, "gpt_neox": {}, "gptj": {}, "opt": {}, "bloom": {}, "falcon": {}, "phi": {}, "phi3": {},
    "stablelm": {}, "starcoder2": {}, "gemma": {}, "gemma2": {}, "gemma3_text": {}, "cohere": {}, "cohere2": {},
    "olmo2": {}, "olmo3": {}, "granite": {}, "glm4": {}, "smollm3": {},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128}, "apertus": {}, "seed_oss": {},
    "nanochat": {}, "gpt_bigcode": {}, "helium": {},
    # latent attention
    "minicpm3": {},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 8, "topk_group": 3}, "deepseek_v3": {}, "youtu": {},
    # mixtures of experts
    "mixtral": {}, "qwen2_moe": {}, "qwen3_moe": {}, "olmoe": {}, "gpt_oss": {}, "glm4_moe": {}, "granitemoe": {},
    "ernie4_5_moe": {}, "phimoe": {}, "minimax_m2": {}, "llama4_text": {},
    # hybrids, state spaces, convolutions; list-valued sizes
    "nemotron_h": {}, "falcon_h1": {}, "granitemoehybrid": {}, "lfm2": {},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 6, "num_hidden_layers": 24},
    "gemma3n_text": {},
    "kimi_linear": {}, "qwen3_next": {}, "qwen3_5_text": {}, "bamba": {}, "zamba2": {}, "mamba2": {},
    "olmo_hybrid": {}, "minimax": {},
}  # fmt: skip


def counted(family: str, sizes: dict[str, Any]) -> int:
    """Return the parameters of transformers' own model."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(family, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def row(family: str, sizes: dict[str, Any], folder: Path, seq: int) -> dict[str, Any]:
    """Return what one configuration gives."""
    path = folder / f"{family}.json"
    path.write_text(json.dumps({"model_type": family, **sizes}))
    found: dict[str, Any] = {"family": family}
    began = time.process_time()
    try:
        report = config_report(path, batch=1, seq=seq)
    except AutoPrecError as error:
        return found | {"refused": f"{error.what}", "seconds": time.process_time() - began}
    found |= {"seconds": time.process_time() - began, "parameters": report.model["parameters"]}
    found |= {"layers": len(report.tunable), "operators": len(report.operators), "class": report.model["class"]}
    return found | {"truth": counted(family, sizes)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CONFIGURATIONS))
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    import torch
    import transformers

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for family in asked.only.split(","):
            rows.append(row(family, CONFIGURATIONS.get(family, {}), Path(folder), asked.seq))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    built = [one for one in rows if "parameters" in one]
    equal = sum(one["parameters"] == one["truth"] for one in built)
    slow = max((one["seconds"] for one in rows), default=0.0)
    lines = [
        "# Language models from their configurations",
        "",
        f"`python {' '.join(sys.argv)}`; transformers {transformers.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}; CPU seconds, imports apart; {datetime.now():%Y-%m-%d}.",
        "",
        f"{len(built)} of {len(rows)} are built and recorded; parameters equal transformers' in {equal}; the slowest "
        f"takes {slow:.0f} s.",
        "",
        "| family | class | parameters | transformers | layers that may change | operators of a step | seconds |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for one in rows:
        if "refused" in one:
            lines.append(f"| {one['family']} | refused: {one['refused'][:160]} | | | | | {one['seconds']:.0f} |")
            continue
        cells = [one["family"], one["class"], f"{one['parameters']:,}", f"{one['truth']:,}", str(one["layers"])]
        cells += [str(one["operators"]), f"{one['seconds']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    print("\n".join(lines))
    if asked.out:
        asked.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
