"""The peer of bench.decode: Hugging Face transformers' beam search over NLLB-MoE's layers.

    .venv-torch/bin/python -m bench.torch_peer.beam_worker SIZES_JSON

Each line of standard input, {"beam", "batch", "length", "clock": "wall" | "cpu", "bfloat16"}, is
answered with {"secs", "mib"}: the time of a call, and the growth of the process's memory during the
call. `bfloat16` turns autocast on. Every hypothesis has the full length. The number of threads is
the number of cores that this process may use.
"""

import functools
import json
import os
import sys

import torch
from transformers import GenerationConfig, NllbMoeConfig, NllbMoeForConditionalGeneration

from bench import call_cost
from bench.torch_peer.sizes import Sizes


def model(sizes: Sizes) -> NllbMoeForConditionalGeneration:
    """Returns a model with random weights, whose sides share a vocabulary of the target's size."""
    assert sizes.head_dim * sizes.num_heads == sizes.model_dim, sizes
    config = NllbMoeConfig(
        vocab_size=sizes.target_vocab_size,
        d_model=sizes.model_dim,
        encoder_layers=sizes.num_layers,
        decoder_layers=sizes.num_layers,
        encoder_ffn_dim=sizes.hidden_dim,
        decoder_ffn_dim=sizes.hidden_dim,
        encoder_attention_heads=sizes.num_heads,
        decoder_attention_heads=sizes.num_heads,
        num_experts=sizes.num_experts,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return NllbMoeForConditionalGeneration(config).eval()


def main(sizes_json: str) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    sizes = Sizes(**json.loads(sizes_json))
    peer = model(sizes)
    for line in sys.stdin:
        case = json.loads(line)
        ids = torch.randint(4, sizes.target_vocab_size, (case["batch"], case["length"]))
        generate = functools.partial(_generate, peer, ids, case["beam"])
        with torch.autocast("cpu", torch.bfloat16, enabled=case["bfloat16"]):
            cost = call_cost.measure(generate, case["clock"])
        print(json.dumps({"secs": cost.secs, "mib": cost.mib}), flush=True)


def _generate(peer: NllbMoeForConditionalGeneration, ids: torch.Tensor, beam: int) -> None:
    batch, length = ids.shape
    config = GenerationConfig(
        num_beams=beam,
        do_sample=False,
        min_new_tokens=length,
        max_new_tokens=length,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    with torch.inference_mode():
        found = peer.generate(ids, generation_config=config)
    assert found.shape == (batch, length + 1), found.shape


if __name__ == "__main__":
    main(sys.argv[1])
