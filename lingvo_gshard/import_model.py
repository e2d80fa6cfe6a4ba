"""Makes a run of a pretrained model that transformers wrote.

    gshard import --from=FOLDER --logdir=RUN
    gshard translate --logdir=RUN --source_lang=deu_Latn --target_lang=fra_Latn

It may be an NLLB-MoE, NLLB-200 or M2M-100; or a decoder with experts, Mixtral, Qwen3-MoE, OLMoE or
Hunyuan 3, for `gshard generate`.

FOLDER is a copy of the model's repository: config.json, the weights in safetensors or in .bin
files, in one or in parts, the tokenizer's files and generation_config.json. A line, `not used:`,
names whatever else it holds. The weights are copied part by part, so a
model may be larger than this machine's memory. If the process is killed, the same command
continues.
"""

import shlex

from absl import flags

from lingvo_gshard import cli, registry
from lingvo_gshard.decoding import reading
from lingvo_gshard.input import manifest
from xla_spmd.files import storage
from xla_spmd.runtime import environment

_FROM = flags.DEFINE_string("from", None, "A folder of a model of transformers.", required=True)
_LOGDIR = flags.DEFINE_string("logdir", None, "The folder of the new run.", required=True)
_SET = flags.DEFINE_multi_string("set", [], "A setting to change, path=value; repeatable.")


def main() -> None:
    """Imports the model; raises ValueError for a user's mistake."""
    from lingvo_gshard.checkpoints import saved_steps
    from lingvo_gshard.hugging_face import families
    from lingvo_gshard.model import placement

    with storage.working(_FROM.value) as folder, storage.working(_LOGDIR.value) as logdir:
        # A model that we do not support, and a wrong setting, are reported before JAX is imported.
        storage.check_writable(logdir)
        saved_steps.check_none(logdir)
        model, settings = families.read(folder).launched_model()
        params = registry.get_params(model, [*settings, *_SET.value])
        placement.check(params, batches=(), num_partitions=None)

        # A part at a time is hashed, which needs no accelerator.
        environment.prepare(1, "cpu")
        from lingvo_gshard.hugging_face import importing

        done = importing.import_folder(folder, logdir, tuple(_SET.value))

    continued = f", of which {done.num_continued} were there" if done.num_continued else ""
    print(
        f"{done.model}: {done.num_weights:,} weights from {done.num_tensor_bytes / 1e9:.2f} GB in "
        f"{done.secs:.1f} s; {done.num_arrays} arrays{continued}. Wrote {_LOGDIR.value}."
    )
    if done.decode_settings:
        print(f"Settings of generate, for decoding: {', '.join(done.decode_settings)}.")
    if done.not_used:
        print(f"not used: {'; '.join(done.not_used)}")
    if not done.has_vocabulary:
        print(
            f"{_FROM.value} has no tokenizer (sentencepiece.bpe.model, or a decoder's "
            "tokenizer.json): it cannot translate or generate."
        )
        return

    command = reading.READINGS[done.kind].command
    options = "--chat " if done.has_chats else ""
    if done.kind == manifest.Kind.PARALLEL:
        options = "--source_lang=CODE --target_lang=CODE "
    print(f"Next: gshard {command} --logdir={shlex.quote(_LOGDIR.value)} {options}< in.txt")


if __name__ == "__main__":
    cli.run("import_model", main)
