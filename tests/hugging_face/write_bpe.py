"""Writes tokenizers of the `tokenizers` library into two of write_decoders.py's folders.

Run it where torch and transformers are installed, in the root of the checkout:

    python -m tests.hugging_face.write_bpe

It writes tokenizer.json, of a vocabulary with the model's special tokens, and texts.json: `ids` of
texts, of which the first ones are prompts; the texts `decoded` from these; `wholes`, prompts with
what generate adds; and `nats`, the loss of documents, each with its EOS, summed over all of its
tokens but the first. mixtral's puts BOS before a text, and qwen3_moe's, whose pieces are bytes,
puts nothing. transformers 5.24.0 and tokenizers 0.23.3 made the files in this folder.
"""

import json
import pathlib

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

MODELS = pathlib.Path(__file__).parent / "models"
_TEXT = ("der hund und die katze", "die katze sah den hund", "a cat and a dog", "und der hund sah")
_PROMPTS = ("der hund", "a cat and", "die")
_DOCUMENTS = ("der hund und die katze sah", "a cat and a dog", "die katze", "und der dog")
_OTHERS = ("katze  und hund", " sah", "sah den dog\nund a cat", "")


def main() -> None:
    """Writes both."""
    metaspace = (pre_tokenizers.Metaspace(), decoders.Metaspace())
    special = {"<unk>": 0, "<s>": 1, "</s>": 2}
    begins = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    _write("mixtral", _tokenizer(special, *metaspace, "<unk>", begins))
    by_bytes = (pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel())
    _write("qwen3_moe", _tokenizer({"<|end|>": 40, "<|pad|>": 57}, *by_bytes, None, None))


def _tokenizer(special, pre_tokenizer, decoder, unknown, processor) -> Tokenizer:
    """Returns a BPE of 56 pieces, whose special tokens have the given ids."""
    trained = Tokenizer(models.BPE(unk_token=unknown))
    trained.pre_tokenizer = pre_tokenizer
    trained.train_from_iterator(_TEXT, trainers.BpeTrainer(vocab_size=50, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    free = [i for i in range(61) if i not in special.values()]
    vocab = special | dict(zip(pieces, free, strict=False))

    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    if processor is not None:
        tokenizer.post_processor = processor
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def _write(name: str, tokenizer: Tokenizer) -> None:
    folder = MODELS / name
    tokenizer.save(str(folder / "tokenizer.json"))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    wholes = []
    for prompt in _PROMPTS:
        ids = torch.tensor([theirs(prompt)["input_ids"]])
        found = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False
        )
        wholes.append(theirs.decode(found[0], skip_special_tokens=True))
    texts = [*_PROMPTS, *_OTHERS]
    ids = [theirs(text)["input_ids"] for text in texts]
    decoded = [theirs.decode(row, skip_special_tokens=True) for row in ids]
    nats = {document: _nats(model, theirs(document)["input_ids"]) for document in _DOCUMENTS}
    values = {"texts": texts, "ids": ids, "decoded": decoded, "wholes": wholes, "nats": nats}
    (folder / "texts.json").write_text(json.dumps(values, ensure_ascii=False) + "\n")
    print(name, ids[0], wholes)


def _nats(model: PreTrainedModel, ids: list[int]) -> float:
    whole = torch.tensor([[*ids, model.config.eos_token_id]])
    with torch.no_grad():
        return len(ids) * model(input_ids=whole, labels=whole).loss.item()


if __name__ == "__main__":
    main()
