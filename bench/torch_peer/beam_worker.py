"""The peer of bench.decode: Hugging Face transformers' beam search over NLLB-MoE's layers.

    .venv-torch/bin/python -m bench.torch_peer.beam_worker SIZES_JSON

Each line of standard input, {"beam", "batch", "length", "clock": "wall" | "cpu", "bfloat16"}, is
answered with {"secs", "mib"}: the time of a call, and the growth of the process's memory during the
call. `bfloat16` turns autocast on. Every hypothesis has the full length.
"""

import functools
import json
import pathlib
import re
import sys
import time
from collections.abc import Callable

import torch
from transformers import GenerationConfig, NllbMoeConfig, NllbMoeForConditionalGeneration

from bench.torch_peer.sizes import Sizes

_THREADS = 2
_CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
_PROCESS = pathlib.Path("/proc/self")


def model(sizes: Sizes) -> NllbMoeForConditionalGeneration:
    """Returns a model with random weights. Both sides share one vocabulary of the target's size."""
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
    torch.set_num_threads(_THREADS)
    torch.manual_seed(0)
    sizes = Sizes(**json.loads(sizes_json))
    peer = model(sizes)
    for line in sys.stdin:
        case = json.loads(line)
        ids = torch.randint(4, sizes.target_vocab_size, (case["batch"], case["length"]))
        clock = _CLOCKS[case["clock"]]
        began = clock()
        with torch.autocast("cpu", torch.bfloat16, enabled=case["bfloat16"]):
            mib = _extra_mib(functools.partial(_generate, peer, ids, case["beam"]))
        print(json.dumps({"secs": clock() - began, "mib": mib}), flush=True)


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


def _extra_mib(call: Callable[[], object]) -> float:
    """Returns how far the process's resident memory rose during the call, in MiB."""
    (_PROCESS / "clear_refs").write_text(
        "5", encoding="utf-8"
    )  # Resets the peak to the present memory.
    before = _status_kib("VmRSS")
    call()
    return (_status_kib("VmHWM") - before) / 1024


def _status_kib(field: str) -> int:
    status = (_PROCESS / "status").read_text(encoding="utf-8")
    found = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    assert found, field
    return int(found[1])


if __name__ == "__main__":
    main(sys.argv[1])
