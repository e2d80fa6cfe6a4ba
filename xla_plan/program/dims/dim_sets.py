"""Disjoint sets of dims: the dims that are the same have one size, and one letter if any."""

Dim = int  # A number of DimSets.
Dims = tuple[Dim, ...]


class DimSets:
    """Disjoint sets of dims; the dims of one set have one size, and one letter if it has any."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._parents: list[Dim] = []
        self._letters: dict[Dim, str] = {}

    def new(self, size: int) -> Dim:
        """Returns a dim that is like no other."""
        self.sizes.append(size)
        self._parents.append(len(self._parents))
        return len(self._parents) - 1

    def find(self, dim: Dim) -> Dim:
        """Returns the one dim that stands for all of its set."""
        while self._parents[dim] != dim:
            self._parents[dim] = self._parents[self._parents[dim]]
            dim = self._parents[dim]
        return dim

    def count(self) -> int:
        """Returns the number of sets."""
        return len(set(map(self.find, range(len(self.sizes)))))

    def letter(self, dim: Dim) -> str | None:
        """Returns the letter that a user has given to a dim of the set, if any."""
        return self._letters.get(self.find(dim))

    def name(self, dim: Dim, letter: str) -> None:
        """Gives a letter to a dim that is alone in its set."""
        self._letters[self.find(dim)] = letter

    def unite(self, a: Dim, b: Dim) -> None:
        """Makes two dims the same, unless their sizes or their letters differ."""
        a = self.find(a)
        b = self.find(b)
        if a == b or self.sizes[a] != self.sizes[b]:
            return

        # Letters that a user gave are kept apart where the program lets them meet.
        kept = self._letters.get(a)
        other = self._letters.get(b)
        if kept is not None and other is not None and kept != other:
            return
        self._parents[b] = a
        if kept is None and other is not None:
            self._letters[a] = other
