"""Results of an experiment's calls: records that a notebook shows as tables and pictures."""

import dataclasses
import html
from typing import TYPE_CHECKING, Any

from lingvo_gshard.train import metrics_files
from xla_spmd.files import storage, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Training:
    """A training: the run's folder, its last step, and the last metrics of dev, if any."""

    logdir: str
    step: int
    metrics: dict[str, float] | None

    def lines(self) -> list[dict[str, Any]]:
        """Returns a record for each call of the train program, with its `step` and `metrics`."""
        return metrics_files.read_lines(storage.path(self.logdir) / metrics_files.TRAIN_METRICS)

    def __str__(self) -> str:
        return table.text(self._rows())

    def _repr_html_(self) -> str:
        # Matplotlib takes half a second, which only a notebook needs.
        from lingvo_gshard.evaluation import html_page

        lines = self.lines()
        if not lines:
            return table.as_html(self._rows())
        picture = html_page.picture("The loss by step.", _draw_loss, lines)
        return f"{table.as_html(self._rows())}\n{picture}"

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("step", f"{self.step} in {self.logdir}")]
        for name, value in sorted((self.metrics or {}).items()):
            if name != "step":
                rows.append((name, f"{value:.6g}"))
        return rows


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """A plan and its text. `plan` has the numbers; an experiment's has them for each program."""

    plan: Any
    text: str

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text)}</pre>"


def _draw_loss(figure: "Figure", lines: list[dict[str, Any]]) -> None:
    figure.set_size_inches(6, 3)
    axes = figure.subplots()
    axes.plot([line["step"] for line in lines], [line["metrics"]["loss"] for line in lines])
    axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
