"""The modes' errors before they compute anything; trainer_test runs the modes."""

from lingvo_gshard.input.base_input import DataFacts
from lingvo_gshard.runs import modes
from lingvo_gshard.runs.launch import Launch

_LAUNCH = Launch("toy.Dense4L", (), "/data", DataFacts(4000, 2000, ("de", "fr")))


def test_a_table_of_metrics_begins_with_the_loss_and_ends_with_the_layers_and_the_time():
    names = ["aux_loss", "aux_loss_encoder_1", "entropy_decoder_1", "nll", "num_batches"]
    names += ["overflow", "perplexity", "secs", "step"]
    shown = modes.metrics_text({name: float(i) for i, name in enumerate(names)})
    assert [line.split()[0] for line in shown.splitlines()] == [
        "step",
        "nll",
        "perplexity",
        "aux_loss",
        "overflow",
        "aux_loss_encoder_1",
        "entropy_decoder_1",
        "num_batches",
        "secs",
    ]
