"""The axes of the meshes that a search tries, which are checked before JAX is imported."""

from collections.abc import Sequence

from xla_spmd.mesh import Mesh


def check(names: Sequence[str]) -> None:
    """Raises ValueError unless these are one or two different names."""
    if not 1 <= len(names) <= 2 or len(set(names)) != len(names):
        raise ValueError(f"--axes={','.join(names)}: expected one or two names of axes.")


def parse_mesh(text: str, names: Sequence[str], num_devices: int) -> Mesh:
    """Returns the mesh of a text such as `data:16,model:4`.

    Raises ValueError for a malformed text, for another number of devices, for more than two axes,
    and if its axes are not those of `names`, unless `names` is empty.
    """
    mesh = Mesh.parse(text, num_devices)
    if len(mesh.axis_names) > 2 or (names and set(names) != set(mesh.axis_names)):
        raise ValueError(f"--mesh={text}: a search takes one or two axes, the same as --axes.")
    return mesh
