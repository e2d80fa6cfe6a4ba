"""The devices that a script or notebook computes on, as a program's flags would name them."""

import dataclasses

from xla_spmd import checks
from xla_spmd.runtime import main_module

_PLATFORMS = ("auto", "cpu", "cuda", "tpu")


@dataclasses.dataclass(frozen=True)
class Devices:
    """A platform, auto, cpu, cuda or tpu, and how many of its devices share the model.

    None takes all accelerators, or one CPU device.
    """

    platform: str = "auto"
    num_partitions: int | None = None

    def __post_init__(self) -> None:
        if self.platform not in _PLATFORMS:
            expected = ", ".join(_PLATFORMS)
            raise ValueError(f"platform={self.platform!r}: expected one of {expected}.")
        count = self.num_partitions
        if count is not None:
            checks.check_count("num_partitions", count)

    def start(self, model: str, num_partitions: int | None = None) -> tuple[int, str]:
        """Starts JAX; returns the number of partitions and a description of the devices.

        `num_partitions` overrides the field. Raises ValueError if JAX has started already with
        fewer devices, if it finds no device of the platform or too few, or if one of the paper's
        models would run on a CPU that the user did not request.
        """
        # JAX is imported here, when all other mistakes have been reported.
        from lingvo_gshard.spmd import devices

        main_module.end_if_imported_again()
        wanted = num_partitions or self.num_partitions
        try:
            devices.prepare(self.platform, wanted or 1)
        except RuntimeError as error:
            raise ValueError(
                f"num_partitions={wanted}: JAX has started in this process already, with fewer "
                "devices; restart it, and make the experiment before JAX computes anything."
            ) from error
        started = devices.start(wanted)
        devices.check_model(model, self.platform)
        return started
