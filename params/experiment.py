"""Builds the Params of a whole experiment from a few numbers.

The tree is task, optimizer, input, eval_input, train, decode, mesh, device_assignment, sharding.
"""

from lingvo_gshard.beam_search.beam import Rules, Stopping
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.input.batches import TranslationInput
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.repeat import Layers, Remat
from lingvo_gshard.layers.stack import TransformerStack
from lingvo_gshard.layers.stored_weights import Numbers
from lingvo_gshard.model.translation import TranslationTask
from lingvo_gshard.optim.adafactor import Adafactor
from lingvo_gshard.train.config import train_params


class Experiment:
    """What all experiments have: a task, its batches, an optimizer, a loop, a mesh and its table.

    A subclass defines Task and Train. As in Lingvo, one may also override Optimizer, Dev or Test,
    and Decode.
    """

    # The paper's: the mesh has one axis, which splits batch, groups and experts.
    MESH = "d:*"
    SHARDING = "BGE:d"
    # The mesh's devices in row-major order; None for their own order.
    DEVICE_ASSIGNMENT: tuple[int, ...] | None = None

    # The training loop and its learning rate.
    MAX_STEPS: int
    ITERATIONS_PER_LOOP = 100
    SAVE_CHECKPOINTS_STEPS = 1000
    DECAY_START = 10_000
    LEARNING_RATE = 1.0
    RAMP_UP_STEPS = 0
    COOL_DOWN_STEPS = 0

    DECODE_BATCH_SIZE = 32  # In rows.

    @classmethod
    def params(cls) -> Params:
        """Returns the whole experiment."""
        experiment = cls()
        p = Params()
        p.Define("task", experiment.Task(), "The model and its loss.")
        p.Define("optimizer", experiment.Optimizer(), "The optimizer and its learning rate.")

        p.Define("input", experiment.Train(), "The batches of training.")
        p.Define("eval_input", experiment.Dev(), "The batches of evaluation.")

        p.Define("train", cls._train(), "The training loop.")
        p.Define("decode", experiment.Decode(), "Decoding, such as by flat beam search.")

        p.Define(
            "mesh",
            cls.MESH,
            "The mesh: axes and their sizes, the slowest first; * is the rest of the devices.",
        )
        assignment = cls.DEVICE_ASSIGNMENT
        p.Define(
            "device_assignment",
            None if assignment is None else list(assignment),
            "The mesh's devices in row-major order (A.3); None for 0, 1, 2, ...",
            optional=list,
        )
        p.Define(
            "sharding",
            cls.SHARDING,
            "The table from letters of dims to axes, such as BG:data+experts,E:experts; "
            "weights.M:x is a row of weights alone, encoder.HN:y one of a stack.",
        )
        return p

    def Task(self) -> Params:
        """Returns the settings of the model and its loss, `task`."""
        raise NotImplementedError(f"{type(self).__name__} defines no Task().")

    def Optimizer(self) -> Params:
        """Returns the settings of the optimizer and its learning rate, `optimizer`."""
        p = Adafactor.Params()
        p.schedule.Set(
            multiplier=self.LEARNING_RATE,
            decay_start=self.DECAY_START,
            ramp_up_steps=self.RAMP_UP_STEPS,
            cool_down_steps=self.COOL_DOWN_STEPS,
            total_steps=self.MAX_STEPS,
        )
        return p

    def Train(self) -> Params:
        """Returns the settings of the batches of training, `input`."""
        raise NotImplementedError(f"{type(self).__name__} defines no Train().")

    def Dev(self) -> Params:
        """Returns the settings of the batches of evaluation, `eval_input`: one pass over dev."""
        # Shuffled, so that even the first batches contain all languages.
        return self.Train().Set(split="dev", repeat=False, shuffle=True)

    def Test(self) -> Params:
        """Returns the settings of the batches of `--mode=eval --split=test`."""
        return self.Dev().Set(split="test")

    def Decode(self) -> Params:
        """Returns the settings of decoding, `decode`."""
        p = Params()
        p.Define("batch_size", self.DECODE_BATCH_SIZE, "Rows that are decoded together.")

        # The weights.
        p.Define(
            "checkpoint_step",
            None,
            "The checkpoint that is decoded or exported; None takes the latest one.",
            optional=int,
        )
        p.Define(
            "average_checkpoints",
            1,
            "Its weights are the mean over N checkpoints, of which it is the last.",
        )
        return p

    @classmethod
    def _train(cls) -> Params:
        return train_params().Set(
            max_steps=cls.MAX_STEPS,
            iterations_per_loop=cls.ITERATIONS_PER_LOOP,
            save_checkpoints_steps=cls.SAVE_CHECKPOINTS_STEPS,
        )


class TransformerExperiment(Experiment):
    """An experiment whose model has stacks of Transformer layers, perhaps with experts."""

    # The model.
    NUM_LAYERS: int  # Of all stacks together.
    MODEL_DIM: int  # M
    HIDDEN_DIM: int  # H
    NUM_HEADS: int  # N
    HEAD_DIM: int  # D
    NUM_EXPERTS: int | None  # E; None for a dense model.
    GROUP_SIZE: int | None = None  # S, in tokens; None chooses one that makes dispatch cheap.
    CAPACITY_MULTIPLE = 1  # C when training is 2S/E, rounded up to a multiple of this.

    # How the program computes it.
    DISPATCH = Dispatch.EINSUM
    LAYERS_AS = Layers.UNROLLED
    REMAT = Remat.NONE
    STAGES = 1  # Of a pipeline; needs LOOP.
    MICROBATCHES = 1
    ACTIVATION_DTYPE = "float32"
    PRODUCT_DTYPE = "float32"

    # Regularization.
    DROPOUT = 0.1
    EXPERT_DROPOUT = 0.0  # Of the hidden units within experts.
    AUX_LOSS_WEIGHT = 0.01  # Of E^2 * l_aux, which is 1 in perfect balance.

    # The batches.
    BATCH_SIZE: int  # B, in rows.
    TARGET_LEN: int  # Of what is predicted, in tokens of a row.
    MAX_REPEATS: float | None = 20.0  # Passes over a language in one over all; None for no limit.

    def Decode(self) -> Params:
        """Returns the settings of flat beam search and sampling, `decode`."""
        p = super().Decode()

        # The search: k and alpha of the original Transformer (Vaswani et al. 2017, section 6.1).
        p.Define("beam_size", 4, "k, the active hypotheses of a sentence.")
        p.Define("num_best", 1, "Hypotheses returned for each sentence, at most k.")
        p.Define("length_norm_alpha", 0.6, "Length normalization's exponent (Wu et al., 2016).")
        p.Define("rules", Rules.WU, "WU, or HUGGING_FACE for scores and ends as transformers has.")
        p.Define("stopping", Stopping.DECIDED, "DECIDED, or LIKELY or FIRST, which end earlier.")
        p.Define("coverage_weight", 0.0, "The weight of the coverage penalty (Wu et al., 2016).")
        p.Define(
            "temperature",
            None,
            "If set, tokens are sampled at this temperature; needs beam_size 1.",
            optional=float,
        )
        p.Define(
            "top_k",
            None,
            "If set, sampling is among this many of the most probable tokens.",
            optional=int,
        )
        p.Define(
            "top_p",
            None,
            "If set, sampling is among the fewest tokens that have this probability in sum.",
            optional=float,
        )
        p.Define("seed", 0, "The seed of sampling.")
        p.Define("tell_attention", False, "Whether to return each token's attention.")

        # How the program computes it.
        weights = "FLOAT32, FLOAT32_LAID_OUT, BFLOAT16 or INT8: what decoders keep large ones in."
        p.Define("weights", Numbers.FLOAT32, weights)
        stages = (
            "The least places that the beam's caches grow by: fewer are faster, but compile longer."
        )
        p.Define("min_stage_places", 128, stages)

        # Lengths and batches.
        p.Define("min_target_len", 1, "The shortest hypothesis, in tokens with EOS.")
        p.Define("max_target_len", self.TARGET_LEN, "The longest hypothesis, in tokens.")
        p.Define(
            "max_sentences",
            None,
            "Sentences of each language in --mode=decode; None decodes all.",
            optional=int,
        )
        return p

    def _stack(self, num_layers: int) -> Params:
        """Returns the settings of a stack of so many layers."""
        p = TransformerStack.Params().Set(
            num_layers=num_layers,
            layers_as=self.LAYERS_AS,
            remat=self.REMAT,
            stages=self.STAGES,
            microbatches=self.MICROBATCHES,
        )
        p.dense.hidden_dim = self.HIDDEN_DIM
        p.layer.attention.Set(num_heads=self.NUM_HEADS, head_dim=self.HEAD_DIM)
        p.layer.attention.dropout.rate = self.DROPOUT
        p.layer.residual_dropout.rate = self.DROPOUT

        if self.NUM_EXPERTS is None:
            p.moe = None
        else:
            p.moe.Set(
                hidden_dim=self.HIDDEN_DIM,
                num_experts=self.NUM_EXPERTS,
                group_size=self.GROUP_SIZE,
                dispatch=self.DISPATCH,
            )
            p.moe.train_capacity.multiple_of = self.CAPACITY_MULTIPLE
            p.moe.hidden_dropout.rate = self.EXPERT_DROPOUT
        return p


class TranslationExperiment(TransformerExperiment):
    """An MoE Transformer into English; subclasses set the numbers, as named in 4.3 and A.2.

    Half of its layers are in the encoder, half in the decoder.
    """

    LABEL_SMOOTHING = 0.1  # Ours, as in the original Transformer; A.2 names none.

    # In pieces; None takes the sizes of the prepared data's vocabularies.
    SOURCE_VOCAB_SIZE: int | None = None
    TARGET_VOCAB_SIZE: int | None = None

    SOURCE_LEN: int  # In tokens of a row.

    def Task(self) -> Params:
        """Returns the settings of the model and its loss, `task`."""
        p = TranslationTask.Params().Set(
            source_vocab_size=self.SOURCE_VOCAB_SIZE,
            target_vocab_size=self.TARGET_VOCAB_SIZE,
            dim=self.MODEL_DIM,
            activation_dtype=self.ACTIVATION_DTYPE,
            product_dtype=self.PRODUCT_DTYPE,
            label_smoothing=self.LABEL_SMOOTHING,
            aux_loss_weight=self.AUX_LOSS_WEIGHT,
            encoder=self._stack(self.NUM_LAYERS // 2),
            decoder=self._stack(self.NUM_LAYERS // 2),
        )
        p.input_dropout.rate = self.DROPOUT
        return p

    def Train(self) -> Params:
        """Returns the settings of the batches of training, `input`."""
        return TranslationInput.Params().Set(
            batch_size=self.BATCH_SIZE,
            source_len=self.SOURCE_LEN,
            target_len=self.TARGET_LEN,
            max_repeats=self.MAX_REPEATS,
        )

    def Decode(self) -> Params:
        """Returns the settings of flat beam search, `decode`."""
        p = super().Decode()
        p.Define("max_source_len", self.SOURCE_LEN, "In tokens; longer sources are split.")
        forces = "Whether each row's input has the first token of its translation: first_ids."
        p.Define("forces_first", False, forces)
        return p
