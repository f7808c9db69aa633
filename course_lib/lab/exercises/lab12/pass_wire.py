"""The wire of exercise 12.3 in one process: units that are gathered, used and freed, and what was seen of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from course_lib.lab.offered import offers


@dataclass
class Use:
    """One `compute(u)`: the state of u then, and which other units were whole or on their way, and waited for."""

    unit: int
    state: str
    started: frozenset[int]
    waited: frozenset[int]


@offers("gather", "free")
@dataclass
class PassWire:
    """`gather(u)` starts and returns a handle, `free(u)` gives the memory back. A unit is `absent`, `coming` or
    `whole`; only the last can be used. `gathers` and `frees` list the calls, `uses` what `compute` saw."""

    units: frozenset[int]
    limit: int
    gathers: list[int] = field(default_factory=list)
    frees: list[int] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    _state: dict[int, str] = field(default_factory=dict)

    def gather(self, u: int) -> PassWork:
        """Start to gather unit u and return at once. Raises `ValueError` for what is no unit of the pass."""
        self._known("gather", u)
        if len(self.gathers) == self.limit:
            raise ValueError(f"gather was called {self.limit} times in this pass; every unit needs one")
        self.gathers.append(u)
        if self.state(u) != "whole":
            self._state[u] = "coming"
        return PassWork(self, u)

    def free(self, u: int) -> None:
        """Give the memory of unit u back. Raises `ValueError` while it is on its way: memory that is written to."""
        self._known("free", u)
        if self.state(u) == "coming":
            raise ValueError(f"free({u}) while unit {u} is on its way; its memory is still written to")
        self.frees.append(u)
        self._state[u] = "absent"

    def compute(self, u: int) -> None:
        """Use unit u."""
        self._known("compute", u)
        if len(self.uses) == self.limit:
            raise ValueError(f"compute was called {self.limit} times in this pass, more often than `order` is long")
        alive = {other for other, state in self._state.items() if state != "absent"}
        self.uses.append(Use(u, self.state(u), frozenset(alive), frozenset(self.whole())))

    def state(self, u: int) -> str:
        return self._state.get(u, "absent")

    def whole(self) -> set[int]:
        return {u for u, state in self._state.items() if state == "whole"}

    def alive(self) -> set[int]:
        return {u for u, state in self._state.items() if state != "absent"}

    def _known(self, what: str, u: int) -> None:
        if u not in self.units:
            raise ValueError(f"{what}({u!r}): the units of this pass are {', '.join(map(str, sorted(self.units)))}")


@offers("wait", "is_completed")
class PassWork:
    """The handle of a gather."""

    def __init__(self, wire: PassWire, unit: int) -> None:
        self._wire, self._unit = wire, unit

    def wait(self, timeout: object = None) -> bool:
        """On ranks this blocks until the unit's parameters are there."""
        if self._wire.state(self._unit) == "coming":
            self._wire._state[self._unit] = "whole"
        return True

    def is_completed(self) -> bool:
        """Asking in a loop is waiting too, so it is noted as that."""
        return self.wait()
