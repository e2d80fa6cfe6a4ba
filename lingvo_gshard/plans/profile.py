"""The output of `trainer --profile_steps`: a trace's steps by category; see docs/watching.md."""

from lingvo_gshard.model import placement
from lingvo_gshard.plans import measured_step
from lingvo_gshard.plans.categories import label
from lingvo_gshard.plans.measured_step import MeasuredStep, Part
from lingvo_gshard.runs.run import Run
from lingvo_gshard.spmd import processes, traces
from lingvo_gshard.train.hooks import TrainHook
from lingvo_gshard.train.profiling import Profile, ProfileHook
from xla_plan.machines import networks
from xla_spmd.files import storage, table


def hooks(run: Run, after: int, upto: int) -> list[TrainHook]:
    """Returns the hooks that trace and report the steps after `after`, up to `upto`.

    Only the first process has hooks, for its own devices. Raises ValueError if one of these steps
    is in the past, or after the last step.
    """
    max_steps = run.params.train.max_steps
    if after < run.done or upto > max_steps:
        raise ValueError(
            f"--profile_steps={after}:{upto}: training goes from step {run.done} to {max_steps}."
        )

    if not processes.is_first():
        return []
    dispatch = placement.dispatch(run.params)
    asked = range(after + 1, upto + 1)
    return [ProfileHook(asked, run.logdir, lambda profile: print(text(profile, dispatch)))]


def text(profile: Profile, dispatch: str | None = None) -> str:
    """Returns the table of a profile, the dispatch to experts, if any, and the path of its trace.

    Raises ValueError if the trace lacks a call, or the instructions of a device.
    """
    mesh = profile.calls[-1].executable.mesh
    network = networks.of_devices(list(mesh.devices.flat))
    measured = measured_step.measure(profile.calls, traces.read(profile.path), network)

    # The traced steps, and the reason that they may be more than the requested ones.
    steps = measured.steps
    asked = profile.asked
    devices = "1 device" if measured.num_devices == 1 else f"{measured.num_devices} devices"
    title = (
        f"Steps {steps.start} to {steps.stop - 1}, {1e3 * measured.secs:.2f} ms each, mean of "
        f"{devices} of this process"
    )
    if steps != asked:
        longest = max(len(call.steps) for call in profile.calls)
        title += (
            f"; {asked[0]} to {asked[-1]} were asked for, but calls of up to {longest} "
            "steps (train.iterations_per_loop) are traced as wholes"
        )
    if dispatch is not None:
        title += f"; tokens reach their experts by {dispatch}"
    rows = table.text(_rows(measured, has_roofline=network is not None))
    return f"\n{title}:\n{rows}\nThe trace is {storage.origin(profile.path)}."


def _rows(measured: MeasuredStep, *, has_roofline: bool) -> list[list[str]]:
    """Returns the header, a row for each part, and their sum."""
    parts = {label(name): part for name, part in measured.parts.items()}
    parts["all"] = Part(
        secs=measured.secs,
        flops=sum(part.flops for part in parts.values()),
        roofline_secs=sum(part.roofline_secs or 0.0 for part in parts.values()),
    )

    columns = ["ms", "share", "Gflop", "Gflop/s"]
    if has_roofline:
        columns += ["roofline ms", "of the roofline"]
    rows = [["of a step, on a device", *columns]]
    for name, part in parts.items():
        cells = _cells(part, measured.secs)
        rows.append([name, *cells[: len(columns)]])
    return rows


def _cells(part: Part, step_secs: float) -> list[str]:
    """Returns the cells of a row; `-` for an undefined rate."""
    gflop = part.flops / 1e9 or None
    roofline_ms = None if part.roofline_secs is None else 1e3 * part.roofline_secs
    return [
        f"{1e3 * part.secs:.3f}",
        f"{part.secs / step_secs:.1%}",
        table.number(gflop, ".3f"),
        table.number(_over(gflop, part.secs), ".1f"),
        table.number(roofline_ms, ".3f"),
        table.number(_over(part.roofline_secs, part.secs), ".0%"),
    ]


def _over(value: float | None, secs: float) -> float | None:
    """Returns a quotient; None if it is undefined."""
    return None if value is None or secs == 0.0 else value / secs
