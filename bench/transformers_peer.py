"""Times the generation with a model of transformers; bench.beside_transformers starts it.

    ENV/bin/python -m bench.transformers_peer FOLDER BATCH.npz SETTINGS

ENV must have torch and transformers. The program prints a JSON object: the ids, the best seconds of
a call, and the peak memory in bytes.
"""

import json
import os
import resource
import sys
import time

import numpy as np
import torch
from transformers import AutoModelForSeq2SeqLM


def main(folder: str, batch_file: str, settings_text: str) -> None:
    settings = json.loads(settings_text)
    calls = settings.pop("calls")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()

    batch = np.load(batch_file)
    ids = torch.tensor(batch["ids"])
    mask = torch.tensor(batch["mask"])
    secs = []
    found = ids
    for _ in range(calls):
        began = time.perf_counter()
        with torch.no_grad():
            found = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, **settings)
        secs.append(time.perf_counter() - began)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"ids": found.tolist(), "secs": min(secs), "peak_bytes": peak_bytes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
