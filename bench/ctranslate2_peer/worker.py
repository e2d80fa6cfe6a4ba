"""The dense peer of bench.decode: CTranslate2's beam search with the same weights.

    .venv-ctranslate2/bin/python -m bench.ctranslate2_peer.worker FOLDER

FOLDER has sizes.json and weights.npz from bench.peer. Each line of standard input, {"beam",
"length", "sources": ids, "clock": "wall" | "cpu", "compute_type"}, is answered with {"secs", "mib",
"ids"}: the time of a call, the growth of the process's memory during it, and the best hypotheses.
Every hypothesis has the full length. The number of threads is the number of cores that this process
may use.
"""

import functools
import json
import os
import pathlib
import sys

import ctranslate2

from bench import call_cost
from bench.ctranslate2_peer import conversion


def main(folder: str) -> None:
    path = pathlib.Path(folder)
    sizes = conversion.DenseSizes(**json.loads((path / "sizes.json").read_text(encoding="utf-8")))
    conversion.convert(sizes, path / "weights.npz", path / "model")

    @functools.cache
    def translator(compute_type: str) -> ctranslate2.Translator:
        return ctranslate2.Translator(
            str(path / "model"),
            device="cpu",
            compute_type=compute_type,
            inter_threads=1,
            intra_threads=len(os.sched_getaffinity(0)),
        )

    for line in sys.stdin:
        case = json.loads(line)
        peer = translator(case["compute_type"])
        # CTranslate2 silently computes with another type if it does not support this one.
        assert peer.compute_type == case["compute_type"], peer.compute_type

        sources = [[conversion.piece(index) for index in row] for row in case["sources"]]
        translate = functools.partial(
            peer.translate_batch,
            sources,
            beam_size=case["beam"],
            min_decoding_length=case["length"],
            max_decoding_length=case["length"],
            max_batch_size=0,
        )
        cost = call_cost.measure(translate, case["clock"])

        ids = [[conversion.index_of(text) for text in row.hypotheses[0]] for row in cost.result]
        print(json.dumps({"secs": cost.secs, "mib": cost.mib, "ids": ids}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
