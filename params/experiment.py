"""Builds the Params of a whole experiment from a few numbers.

The tree is task, optimizer, input, eval_input, train, decode, mesh, device_assignment, sharding.
"""

from lingvo_gshard.core.hyperparams import (
    REQUIRED,
    BaseParams,
    InstantiableParams,
    Params,
    setting,
)
from lingvo_gshard.input.batches import TranslationInput
from lingvo_gshard.layers.dispatch import Dispatch
from lingvo_gshard.layers.moe import MoELayer
from lingvo_gshard.layers.numerics import Remat
from lingvo_gshard.layers.repeat import Layers
from lingvo_gshard.layers.stack import TransformerStack
from lingvo_gshard.model.decode_params import (
    DecodeParams,
    SearchParams,
    TranslationDecodeParams,
)
from lingvo_gshard.model.translation import TranslationTask
from lingvo_gshard.optim.adafactor import Adafactor
from lingvo_gshard.optim.optimizer import Optimizer
from lingvo_gshard.train.config import TrainParams


class ExperimentParams(Params):
    """A whole experiment. A user's experiment may Define more."""

    task: InstantiableParams = setting(REQUIRED, "The model and its loss.")
    optimizer: InstantiableParams = setting(REQUIRED, "The optimizer and its learning rate.")

    input: InstantiableParams = setting(REQUIRED, "The batches of training.")
    eval_input: InstantiableParams = setting(REQUIRED, "The batches of evaluation.")

    train: TrainParams = setting(REQUIRED, "The training loop.")
    decode: DecodeParams = setting(REQUIRED, "Decoding, such as by flat beam search.")

    mesh: str = setting(
        REQUIRED,
        "The mesh: axes and their sizes, slowest axis first; * takes the remaining devices.",
    )
    device_assignment: list[int] | None = setting(
        None, "The mesh's devices in row-major order (A.3); None means 0, 1, 2, ..."
    )
    sharding: str = setting(
        REQUIRED,
        "The table from letters of dims to axes, such as BG:data+experts,E:experts; "
        "weights.M:x is a row only for weights, encoder.HN:y a row only for one stack.",
    )


class Experiment:
    """The parts of every experiment: task, batches, optimizer, loop, mesh and sharding table.

    A subclass defines Task and Train. As in Lingvo, it may also override Optimizer, Dev or Test,
    and Decode.
    """

    # The paper's sharding: the mesh has one axis, which splits batch, groups and experts.
    MESH = "d:*"
    SHARDING = "BGE:d"
    # The mesh's devices in row-major order; None keeps their own order.
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
    def params(cls) -> ExperimentParams:
        """Returns the whole experiment."""
        experiment = cls()
        p = ExperimentParams().Set(
            task=experiment._returned("Task"),
            optimizer=experiment._returned("Optimizer"),
            input=experiment._returned("Train"),
            eval_input=experiment._returned("Dev"),
            train=cls._train(),
            decode=experiment._returned("Decode"),
        )

        assignment = cls.DEVICE_ASSIGNMENT
        return p.SetDefaults(
            mesh=cls.MESH,
            device_assignment=None if assignment is None else list(assignment),
            sharding=cls.SHARDING,
        )

    def _returned(self, method: str) -> BaseParams:
        """Returns the settings from a method. Raises ValueError if it returns anything else."""
        p = getattr(self, method)()
        if not isinstance(p, BaseParams):
            raise ValueError(
                f"{type(self).__name__}.{method}() returns {p!r}; expected settings: end it by "
                "`return p`."
            )
        return p

    def Task(self) -> InstantiableParams:
        """Returns the settings of the model and its loss, `task`."""
        raise NotImplementedError(f"{type(self).__name__} defines no Task().")

    def Optimizer(self) -> Optimizer.Params:
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

    def Train(self) -> InstantiableParams:
        """Returns the settings of the batches of training, `input`."""
        raise NotImplementedError(f"{type(self).__name__} defines no Train().")

    def Dev(self) -> InstantiableParams:
        """Returns the settings of the batches of evaluation, `eval_input`: one pass over dev."""
        # Shuffled, so that even the first batches contain all languages.
        return self.Train().Set(split="dev", repeat=False, shuffle=True)

    def Test(self) -> InstantiableParams:
        """Returns the settings of the batches of `--mode=eval --split=test`."""
        return self.Dev().Set(split="test")

    def Decode(self) -> DecodeParams:
        """Returns the settings of decoding, `decode`."""
        return DecodeParams().SetDefaults(batch_size=self.DECODE_BATCH_SIZE)

    @classmethod
    def _train(cls) -> TrainParams:
        return TrainParams().Set(
            max_steps=cls.MAX_STEPS,
            iterations_per_loop=cls.ITERATIONS_PER_LOOP,
            save_checkpoints_steps=cls.SAVE_CHECKPOINTS_STEPS,
        )


class TransformerExperiment(Experiment):
    """An experiment whose model has stacks of Transformer layers, perhaps with experts."""

    # The model.
    NUM_LAYERS: int  # In all stacks together.
    MODEL_DIM: int  # M
    HIDDEN_DIM: int  # H
    NUM_HEADS: int  # N
    HEAD_DIM: int  # D
    NUM_EXPERTS: int | None  # E; None for a dense model.
    GROUP_SIZE: int | None = None  # S, in tokens; None chooses a size that makes dispatch cheap.
    CAPACITY_MULTIPLE = 1  # C when training is 2S/E, rounded up to a multiple of this.

    # How the program computes the model.
    DISPATCH = Dispatch.EINSUM
    LAYERS_AS = Layers.UNROLLED
    REMAT = Remat.NONE
    STAGES = 1  # The stages of a pipeline; more than one needs LOOP.
    MICROBATCHES = 1
    ACTIVATION_DTYPE = "float32"
    PRODUCT_DTYPE = "float32"

    # Regularization.
    DROPOUT = 0.1
    EXPERT_DROPOUT = 0.0  # For the hidden units within experts.
    AUX_LOSS_WEIGHT = 0.01  # The weight of E^2 * l_aux, which is 1 if the balance is perfect.

    # The batches.
    BATCH_SIZE: int  # B, in rows.
    TARGET_LEN: int  # The length of the predicted part of a row, in tokens.
    MAX_REPEATS: float | None = 20.0  # Passes over a language during one over all; None: no limit.

    def Decode(self) -> SearchParams:
        """Returns the settings of flat beam search and sampling, `decode`."""
        decode = SearchParams()
        self._set_sizes(decode)
        return decode

    def _set_sizes(self, decode: SearchParams) -> None:
        """Makes the experiment's sizes the defaults of a search."""
        decode.SetDefaults(batch_size=self.DECODE_BATCH_SIZE, max_target_len=self.TARGET_LEN)

    def _stack(self, num_layers: int) -> TransformerStack.Params:
        """Returns the settings of a stack of this many layers."""
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
            p.moe = MoELayer.Params().Set(
                hidden_dim=self.HIDDEN_DIM,
                num_experts=self.NUM_EXPERTS,
                group_size=self.GROUP_SIZE,
                dispatch=self.DISPATCH,
            )
            p.moe.train_capacity.multiple_of = self.CAPACITY_MULTIPLE
            p.moe.hidden_dropout.rate = self.EXPERT_DROPOUT
        return p


class TranslationExperiment(TransformerExperiment):
    """An MoE Transformer into English; subclasses set the numbers, named as in 4.3 and A.2.

    Half of the layers are in the encoder, half in the decoder.
    """

    LABEL_SMOOTHING = 0.1  # Our choice, as in the original Transformer; A.2 does not state it.
    # In pieces; None takes the vocabulary sizes of the prepared data.
    SOURCE_VOCAB_SIZE: int | None = None
    TARGET_VOCAB_SIZE: int | None = None

    SOURCE_LEN: int  # The length of a row's source, in tokens.

    def Task(self) -> TranslationTask.Params:
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

    def Train(self) -> TranslationInput.Params:
        """Returns the settings of the batches of training, `input`."""
        return TranslationInput.Params().Set(
            batch_size=self.BATCH_SIZE,
            source_len=self.SOURCE_LEN,
            target_len=self.TARGET_LEN,
            max_repeats=self.MAX_REPEATS,
        )

    def Decode(self) -> TranslationDecodeParams:
        """Returns the settings of flat beam search, `decode`."""
        decode = TranslationDecodeParams()
        self._set_sizes(decode)
        return decode.SetDefaults(max_source_len=self.SOURCE_LEN)
