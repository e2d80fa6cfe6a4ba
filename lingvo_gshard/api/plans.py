"""Plans for machines that are not at hand, of any JAX function and of experiments."""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lingvo_gshard.api.results import PlanReport
from xla_spmd.runtime import environment


def plan(jitted: Any, args: Sequence[Any], topology: str, **options: Any) -> PlanReport:
    """Returns the plan of a call `jitted(*args)` on a topology such as `v5e:4x4` or `h100:2x8`.

    Args:
      jitted: a function of jax.jit.
      args: a tuple of its arguments: trees of arrays or ShapeDtypeStructs, with shardings on a mesh
        of as many devices as the topology has, which may be a jax.sharding.AbstractMesh.
      topology: the machine's name.
      **options: `roles`, `categories`, `kernel_flops`, `device_order` and `compiler_options` of
        `xla_plan.plan`.

    The plan of too large a program states the excess. Raises ValueError if `jitted` is not a
    function of jax.jit, if `args` is not a tuple or list, if the topology is unknown, or if no
    argument has a sharding.
    """
    if not hasattr(jitted, "lower"):
        raise ValueError(
            f"plan: expected a function of jax.jit, got {jitted!r}: jax.jit(function)."
        )
    if not isinstance(args, tuple | list):
        kind = type(args).__name__
        raise ValueError(f"plan: args: expected a tuple of the arguments, got {kind}: (args,).")

    with environment.quiet_stderr():  # JAX 0.10 logs a missing driver.
        import xla_plan

        made = xla_plan.plan(jitted, tuple(args), topology, **options)
    return PlanReport(made, xla_plan.text(made))


def of_experiment(
    model: str,
    settings: Sequence[str],
    topology: str,
    programs: Sequence[str] | None,
    folder: str | pathlib.Path | None,
) -> PlanReport:
    """Returns the plan of some programs of an experiment; None stands for all of them.

    The plan is kept in `folder`, if it is given. Raises ValueError for an unknown model, setting,
    topology or program, for a vocabulary without a size, or if the mesh does not fit the cores.
    """
    from lingvo_gshard.plans.request import make_request

    request = make_request(model, topology, settings, None)
    if programs is not None:
        request = request.only(programs)

    # A mistake has been reported by now, before JAX is imported.
    from lingvo_gshard.plans import kept_plans, least_remat, plan_text

    with tempfile.TemporaryDirectory() as temporary, _on_cpu():
        kept_in = pathlib.Path(folder or temporary)
        made = kept_plans.load_or_make(least_remat.resolved(request, kept_in), kept_in)
    return PlanReport(made, plan_text.screen(made))


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    """Keeps the processes that are started in this context from taking this machine's devices."""
    name = "JAX_PLATFORMS"
    before = os.environ.get(name)
    os.environ[name] = "cpu"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def vocabulary_settings(params: Any, facts: Any) -> Mapping[str, int]:
    """Returns the sizes of the data's vocabularies that the experiment does not set."""
    sizes = facts.vocabulary_sizes(list(params.task.cls.VOCABULARIES))
    return {f"task.{name}": size for name, size in sizes.items() if params.task.Get(name) is None}
