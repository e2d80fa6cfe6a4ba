"""Experiments as objects, which scripts and notebooks train, evaluate, plan and decode.

import lingvo_gshard as gshard

experiment = gshard.experiment("toy.MoE8E4L", data_dir="DATA", logdir="RUN")
experiment.train()
print(experiment.translate("Zwei Hunde spielen im Schnee."))
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lingvo_gshard import registry
from lingvo_gshard.api import loading, plans
from lingvo_gshard.api.devices import Devices
from lingvo_gshard.api.results import PlanReport, Training
from lingvo_gshard.api.text_model import DecodesLines, TextModel
from lingvo_gshard.core import settings as core_settings
from lingvo_gshard.core.hyperparams import Params
from lingvo_gshard.decoding import bundle_spec
from lingvo_gshard.runs import launch as launches
from lingvo_gshard.runs import opening
from lingvo_gshard.train.hooks import EXIT_STATUS, TrainHook
from xla_spmd import checks
from xla_spmd.files import storage
from xla_spmd.runtime import main_module

if TYPE_CHECKING:
    from lingvo_gshard.evaluation.quality import Quality
    from lingvo_gshard.runs.modes import Evaluation
    from lingvo_gshard.runs.run import Run


def models() -> list[str]:
    """Returns the names of all registered experiments, sorted."""
    return registry.registered_names()


def experiment(
    model: str | None = None,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    logdir: str | os.PathLike[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    platform: str = "auto",
    num_partitions: int | None = None,
) -> Experiment:
    """Returns a registered experiment, to train, evaluate, plan, decode and export.

    Args:
      model: its name, such as `toy.MoE8E4L`; by default the model of the run in `logdir`.
      data_dir: the folder that `gshard prepare` wrote; by default the run's data.
      logdir: the run's folder, which a plan does not need.
      settings: changes to its settings by dotted path, such as {"train.max_steps": 500}.
      platform: auto, cpu, cuda or tpu.
      num_partitions: the devices that share the model; by default all accelerators, or one CPU
        device.

    The call does not compute anything or start a device. Raises ValueError if the model or a
    setting is unknown, if a value has the wrong type, if the data was not prepared, or if neither a
    model nor a run is given.
    """
    made = Experiment(
        model,
        data_dir=None if data_dir is None else storage.expanded(data_dir, "data_dir"),
        logdir=None if logdir is None else storage.expanded(logdir, "logdir"),
        settings=core_settings.as_texts(settings),
        devices=Devices(platform, num_partitions),
    )
    made.check()
    return made


@dataclasses.dataclass(frozen=True)
class Experiment(DecodesLines):
    """A registered experiment with its data, a folder, changed settings and devices.

    Each call of `translate` or `generate` reads the weights. For many calls, keep `text_model()`.
    """

    model: str | None
    data_dir: str | None
    logdir: str | None
    settings: tuple[str, ...]
    devices: Devices

    def check(self) -> None:
        """Raises ValueError for a mistake; ends a child process that runs the script again."""
        main_module.end_if_imported_again()
        is_recorded = self.logdir is not None and storage.is_bucket(self.logdir)
        if self.model is not None or not is_recorded:
            self._params()

    @property
    def params(self) -> Params:
        """All settings, with the requested changes; the text has one line for each."""
        return self._params()

    def train(self, *, evaluate: bool = True, hooks: Sequence[TrainHook] = ()) -> Training:
        """Trains to train.max_steps, or continues there; returns the last metrics of dev.

        Without `evaluate`, dev is not evaluated. Ctrl-C saves, and ends with KeyboardInterrupt; the
        next call continues. Raises ValueError without a logdir, if the data or the model differs
        from the run's, and while another process trains in the folder.
        """
        checks.check_each("train: hooks", hooks, TrainHook, "a list of TrainHooks")
        inputs = ["input", "eval_input"] if evaluate else ["input"]

        def check(launch: launches.Launch, folder: str) -> None:
            launches.check_to_train(launch, folder, evaluates=evaluate)
            launches.check_files(launch, inputs)

        with self._opened(check, trains=True) as run:
            from lingvo_gshard.runs import modes

            metrics = None
            with _interrupts():
                if evaluate:
                    metrics = modes.train_and_eval(run, hooks, tell=_tell_nothing)
                else:
                    modes.train(run, hooks)
            return Training(self._folder(), run.done, metrics)

    def evaluate(self, split: str = "dev") -> Evaluation:
        """Returns the metrics of dev or test, and of each of its languages.

        Raises ValueError for an unknown split, without a checkpoint, or if the data differs from
        the run's.
        """
        with self._opened(functools.partial(launches.check_to_evaluate, split=split)) as run:
            from lingvo_gshard.runs import modes

            return modes.evaluate(run, split, tell=_tell_nothing)

    def decode(self, split: str = "test") -> Quality | None:
        """Translates a split and returns its scores by language: BLEU, chrF and chrF++.

        It writes the translations to LOGDIR/decode_SPLIT, and returns None for a language model,
        which is not scored. Raises ValueError if no language has the split, without a checkpoint,
        or if the data differs from the run's.
        """
        with self._opened(functools.partial(launches.check_to_decode, split=split)) as run:
            from lingvo_gshard.evaluation import decode_split

            return decode_split.decode_split(run, split, tell=_tell_nothing)

    def text_model(self) -> TextModel:
        """Returns the trained model, to decode any number of lines; see `load`."""
        return self._model_for()

    def plan(
        self,
        topology: str,
        *,
        programs: Sequence[str] | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> PlanReport:
        """Returns the memory and time that the programs take on a machine such as `v5e:4x4`.

        `programs` are some of train, initialize, evaluate and decode, by default all. The plan is
        kept in `folder`, if it is given. Raises ValueError for an unknown topology or program, for
        a vocabulary whose size neither data nor a setting gives, or if the mesh does not fit.
        """
        launch = self._launch()
        if launch is None:
            model = self._named_model()
            settings = self.settings
        else:
            model = launch.model
            settings = launch.overrides
            params = registry.get_params(model, settings)
            sizes = plans.vocabulary_settings(params, launch.facts)
            settings += tuple(f"{path}={size}" for path, size in sizes.items())
        out = None if folder is None else storage.expanded(folder)
        return plans.of_experiment(model, settings, topology, programs, out)

    def export(self, folder: str | os.PathLike[str]) -> str:
        """Writes a bundle, which decodes without TensorFlow or the run; returns its folder.

        Raises ValueError without a checkpoint, or if the folder holds anything but a bundle.
        """
        target = storage.expanded(folder, "folder")
        storage.check_writable(target)
        if not storage.is_bucket(target):
            bundle_spec.check_folder(target)
        with opening.to_decode(self._folder(), self.devices.start, settings=self.settings) as run:
            run.export_bundle(target)
        return target

    def _model_for(
        self, command: str | None = None, check: opening.Check | None = None
    ) -> TextModel:
        # For the errors, see opening.to_decode.
        return loading.of_run(self._folder(), self.settings, self.devices, command, check)

    @contextlib.contextmanager
    def _opened(self, check: opening.CheckLaunch, trains: bool = False) -> Iterator[Run]:
        """Yields the run, on devices that have started, unless `check` raises ValueError before."""
        opened = opening.to_train(
            self.model,
            self.settings,
            self.data_dir,
            self._folder(),
            self.devices.start,
            check=check,
            trains=trains,
        )
        with opened as (run, _):
            yield run

    def _folder(self) -> str:
        if self.logdir is None:
            raise ValueError("experiment: logdir, the folder of the run, is missing.")
        return self.logdir

    def _named_model(self) -> str:
        if self.model is None:
            raise ValueError(
                "experiment: give the name of a model, or the logdir of a run; gshard.models() has "
                "the names."
            )
        return self.model

    def _launch(self) -> launches.Launch | None:
        """Returns the launch, completed by the run's record; None without data and a record."""
        needs_run = self.model is None or self.data_dir is None
        if needs_run:
            # A bucket's record is read when the run is opened.
            if self.logdir is None or storage.is_bucket(self.logdir):
                return None
            if self.data_dir is None and not launches.holds_run(self.logdir):
                return None
        return launches.launch_of(self.model, self.settings, self.data_dir, self.logdir or "")

    def _params(self) -> Params:
        launch = self._launch()
        if launch is None:
            return registry.get_params(self._named_model(), self.settings)
        return launches.experiment_params(launch)


@contextlib.contextmanager
def _interrupts() -> Iterator[None]:
    """Turns the exit of a saved run that a signal stopped into KeyboardInterrupt."""
    try:
        yield
    except SystemExit as end:
        if end.code != EXIT_STATUS:
            raise
        raise KeyboardInterrupt("training was stopped, and train() continues it") from None


def _tell_nothing(line: str) -> None:
    """Prints nothing: the result has it all."""
