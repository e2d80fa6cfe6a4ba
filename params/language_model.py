"""Builds the Params of a language model's experiment from a few numbers."""

from lingvo_gshard.input.text_rows import TextInput
from lingvo_gshard.model.decode_params import ContinuationDecodeParams
from lingvo_gshard.model.language_model import LanguageModelTask
from params.experiment import TransformerExperiment


class LanguageModelExperiment(TransformerExperiment):
    """A decoder of NUM_LAYERS layers; TARGET_LEN is the length of a row."""

    VOCAB_SIZE: int | None = None  # In pieces; None takes the size of the data's vocabulary.
    TIED_SOFTMAX = False
    LABEL_SMOOTHING = 0.0
    MAX_PROMPT_LEN: int | None = None  # In tokens; None means half a row.

    def Task(self) -> LanguageModelTask.Params:
        """Returns the settings of the model and its loss, `task`."""
        p = LanguageModelTask.Params().Set(
            vocab_size=self.VOCAB_SIZE,
            dim=self.MODEL_DIM,
            activation_dtype=self.ACTIVATION_DTYPE,
            product_dtype=self.PRODUCT_DTYPE,
            label_smoothing=self.LABEL_SMOOTHING,
            aux_loss_weight=self.AUX_LOSS_WEIGHT,
            tied_softmax=self.TIED_SOFTMAX,
            decoder=self._stack(self.NUM_LAYERS),
        )
        p.input_dropout.rate = self.DROPOUT
        return p

    def Train(self) -> TextInput.Params:
        """Returns the settings of the batches of training, `input`."""
        return TextInput.Params().Set(batch_size=self.BATCH_SIZE, row_len=self.TARGET_LEN)

    def Decode(self) -> ContinuationDecodeParams:
        """Returns the settings for continuing prompts, `decode`."""
        longest = self.TARGET_LEN // 2 if self.MAX_PROMPT_LEN is None else self.MAX_PROMPT_LEN
        decode = ContinuationDecodeParams()
        self._set_sizes(decode)
        return decode.SetDefaults(max_prompt_len=longest, prompt_len=min(32, longest))
