"""What a compressor keeps between updates, by parameter, written in full or not at all.

Buckets are rebuilt, parameters stay: so every value has the name of its parameter, and a bucket's flat
tensor is only how values that travel together lie together. And an update may be skipped, so what a
backward pass writes counts only when `commit()` says so; that costs a second copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

Names = tuple[str, ...]


class Memory:
    """One 1-D tensor a parameter. `sizes` gives their lengths, `initial(name)` their first values (default zeros)."""

    def __init__(self, sizes: Mapping[str, int], initial: Callable[[str], torch.Tensor] | None = None) -> None:
        self.sizes = dict(sizes)
        self._initial = initial or (lambda name: torch.zeros(self.sizes[name]))
        self._kept: dict[str, torch.Tensor] = {}
        self._flat: dict[Names, torch.Tensor] = {}
        self._next: dict[Names, torch.Tensor] = {}
        self._spare: dict[Names, torch.Tensor] = {}
        self._before: dict[Names, torch.Tensor] = {}
        self._still: set[str] = set()

    def read(self, names: Names, like: torch.Tensor) -> torch.Tensor:
        """The values of these parameters, one after the other, with the dtype and device of `like`. Not to be
        written to."""
        if names not in self._flat:
            self._forget(names)
            parts = [self._kept[n] if n in self._kept else self._initial(n) for n in names]
            self._keep(names, torch.cat([p.to(like) for p in parts]) if parts else like.new_empty(0))
        return self._flat[names]

    def write(self, names: Names, like: torch.Tensor) -> torch.Tensor:
        """An uninitialised tensor for the values these parameters have after `commit()`."""
        current = self.read(names, like)
        self._before.clear()
        spare = self._spare.pop(names, None)
        self._next[names] = torch.empty_like(current) if spare is None else spare
        return self._next[names]

    def stay(self, name: str) -> None:
        """What this parameter has now holds after the next `commit()` too, whatever is written."""
        self._still.add(name)

    def commit(self) -> None:
        """What was written since the last commit holds from now on."""
        for names, flat in self._next.items():
            for name, piece in zip(names, self._pieces(names, flat)) if self._still else ():
                if name in self._still:
                    piece.copy_(self._kept[name])
            self._spare[names] = self._before[names] = self._flat[names]
            self._keep(names, flat)
        self._next.clear()
        self._still.clear()

    def take_back(self) -> None:
        """The last commit never was, if nothing was written since."""
        for names, flat in self._before.items():
            self._spare[names] = self._flat[names]
            self._keep(names, flat)
        self._before.clear()

    def discard(self) -> None:
        """What was written since the last commit never was."""
        self._spare.update(self._next)
        self._next.clear()
        self._still.clear()

    def scale(self, factor: float) -> None:
        """Multiply all that holds. Between two passes."""
        for flat in self._flat.values():
            flat.mul_(factor)
        for name in self._kept.keys() - {n for names in self._flat for n in names}:
            self._kept[name] = self._kept[name] * factor

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self._kept.items()}

    def refuse_other(self, state: Mapping[str, torch.Tensor]) -> None:
        """Raises `ValueError` for what `load_state_dict` must not take."""
        for name, value in state.items():
            if not (isinstance(value, torch.Tensor) and value.shape == (self.sizes.get(name),)):
                raise ValueError(f"the state is damaged: what it keeps of {name!r} is not a 1-D tensor of "
                                 f"{self.sizes.get(name, 'no')} numbers")
            if not torch.isfinite(value).all():
                raise ValueError(f"the state is damaged: what it keeps of {name!r} is not finite")

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._flat, self._next, self._spare, self._before, self._still = {}, {}, {}, {}, set()
        self._kept = {name: value.clone() for name, value in state.items()}

    def _keep(self, names: Names, flat: torch.Tensor) -> None:
        self._flat[names] = flat
        self._kept.update(zip(names, self._pieces(names, flat)))

    def _pieces(self, names: Names, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        return flat.split([self.sizes[n] for n in names])

    def _forget(self, names: Sequence[str]) -> None:
        """Drop the buckets these parameters were in; the values stay, by name."""
        for old in [k for k in self._flat if not set(k).isdisjoint(names)]:
            del self._flat[old]
            self._spare.pop(old, None)
