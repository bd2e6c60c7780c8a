"""Few-shot tasks: N-way M-shot episodes drawn from classes, and sinusoids. Drawn on the host, repeatably."""

import abc
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32

from bilax.datasets.classes import Classes
from bilax.files import DataError

Augment = Callable[[Float32[np.ndarray, "n h w c"], np.random.Generator], Float32[np.ndarray, "n h w c"]]
"""pictures with numbers in [0, 1], and what draws, to pictures that are a little different"""


class Episode(NamedTuple):
    """Tasks, along the leading axis of every field: what a follower learns from and what it is judged by."""

    support: Any
    """(tasks, way · shots, ...): D_tr"""
    support_targets: Any
    """(tasks, way · shots) labels in 0..way-1, or (tasks, shots, 1) values"""
    query: Any
    """(tasks, way · queries, ...): D_val"""
    query_targets: Any


class _Batches(abc.ABC):
    """An endless iterable of numbered batches."""

    @abc.abstractmethod
    def batch(self, index: int) -> Episode:
        """Batch number `index`."""

    def starting_at(self, index: int) -> Iterator[tuple[Episode]]:
        """The batches from number `index` on, so that a resumed run need not draw those before."""
        return ((self.batch(i),) for i in itertools.count(index))

    def __iter__(self) -> Iterator[tuple[Episode]]:
        return self.starting_at(0)


@dataclasses.dataclass(frozen=True)
class Episodes(_Batches):
    """An endless iterable of batches of N-way M-shot tasks, for `solve(data=..., tasks=True)`.

    Batch i depends on the seed and on i alone. In each task `way` classes are drawn and numbered anew, and of each
    class `shots` pictures to learn from and `queries` others to be judged by. Bytes become numbers in [0, 1]. `augment`
    makes each picture a little different, such as `distort` and `crop_and_flip`.
    """

    classes: Classes
    way: int = 5
    shots: int = 1
    queries: int = 15
    tasks: int = 4
    seed: int = 0
    augment: Augment | None = None

    def __post_init__(self):
        _check_counts(self, ("way", "shots", "queries", "tasks"))
        if self.way > len(self.classes.names):
            raise DataError(
                f"way={self.way} needs as many classes; there are {len(self.classes.names)}: lower it, or add classes."
            )
        need = self.shots + self.queries
        for name, pictures in zip(self.classes.names, self.classes.pictures, strict=True):
            if len(pictures) < need:
                raise DataError(
                    f"class {name} has {len(pictures)} pictures, but shots={self.shots} and queries={self.queries} "
                    f"need {need}: lower one of them, or leave the class out."
                )

    def batch(self, index: int) -> Episode:
        draw = np.random.default_rng((self.seed, index))
        return _stack([self._task(draw) for _ in range(self.tasks)])

    def _task(self, draw: np.random.Generator) -> Episode:
        support, query = [], []
        for c in draw.choice(len(self.classes.names), self.way, replace=False):
            pictures = self.classes.pictures[c]
            rows = draw.choice(len(pictures), self.shots + self.queries, replace=False)
            chosen = np.asarray(pictures[rows], np.float32) / np.float32(255)
            if self.augment is not None:
                chosen = self.augment(chosen, draw)
            support.append(chosen[: self.shots])
            query.append(chosen[self.shots :])
        labels = np.arange(self.way, dtype=np.int32)
        return Episode(
            np.concatenate(support),
            np.repeat(labels, self.shots),
            np.concatenate(query),
            np.repeat(labels, self.queries),
        )


def distort(pictures: Float32[np.ndarray, "n h w c"], draw: np.random.Generator) -> Float32[np.ndarray, "n h w c"]:
    """Each picture under an affine map of its own, with zeros outside.

    As Koch, Zemel and Salakhutdinov 2015 (Section 3.3.2): turned by up to 10°, sheared by up to 0.3, scaled by 0.8 to
    1.2 and shifted by up to 2 of 28 pixels, each with probability 1/2.
    """
    from scipy import ndimage  # what nobody distorts need not load: it takes 14 MB

    n, height, width, _ = pictures.shape

    def some(low: float, high: float, count: int) -> np.ndarray:
        return np.where(draw.random((n, count)) < 0.5, draw.uniform(low, high, (n, count)), (low + high) / 2)

    angle, shear = some(-np.pi / 18, np.pi / 18, 1)[:, 0], some(-0.3, 0.3, 2)
    scale, shift = some(0.8, 1.2, 2), some(-2 / 28, 2 / 28, 2) * (height, width)
    turn = np.stack([np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)], 1).reshape(n, 2, 2)
    skew = np.stack([np.ones(n), shear[:, 0], shear[:, 1], np.ones(n)], 1).reshape(n, 2, 2)
    centre = np.array([(height - 1) / 2, (width - 1) / 2])
    matrices = turn @ skew * scale[:, None]
    offsets = centre + shift - matrices @ centre
    moved = np.empty_like(pictures)
    for picture, matrix, offset, out in zip(pictures, matrices, offsets, moved, strict=True):
        for c in range(pictures.shape[3]):
            ndimage.affine_transform(picture[..., c], matrix, offset, output=out[..., c], order=1, mode="grid-constant")
    return moved


def crop_and_flip(
    pictures: Float32[np.ndarray, "n h w c"], draw: np.random.Generator
) -> Float32[np.ndarray, "n h w c"]:
    """Each picture shifted by up to an eighth of its sides, the edges reflected, and every second one mirrored.

    As usual for CIFAR (He et al. 2016, Section 4.2), whose 32 × 32 pictures are shifted by up to 4.
    """
    n, height, width, _ = pictures.shape
    room = (height // 8, width // 8)
    padded = np.pad(pictures, ((0, 0), (room[0],) * 2, (room[1],) * 2, (0, 0)), "reflect")
    tops, lefts = (draw.integers(0, 2 * most + 1, n) for most in room)
    rows, columns = tops[:, None] + np.arange(height), lefts[:, None] + np.arange(width)
    mirrored = draw.random(n) < 0.5
    columns[mirrored] = columns[mirrored, ::-1]
    return padded[np.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]


@dataclasses.dataclass(frozen=True)
class Sinusoids(_Batches):
    """An endless iterable of batches of regression tasks: y = a sin(x − b), a in [0.1, 5], b in [0, π], x in [−5, 5].

    Finn et al. 2017, Section 5.1. Batch i depends on the seed and on i alone.
    """

    shots: int = 10
    queries: int = 10
    tasks: int = 4
    seed: int = 0

    def __post_init__(self):
        _check_counts(self, ("shots", "queries", "tasks"))

    def batch(self, index: int) -> Episode:
        draw = np.random.default_rng((self.seed, index))
        amplitude = draw.uniform(0.1, 5, (self.tasks, 1, 1))
        phase = draw.uniform(0, np.pi, (self.tasks, 1, 1))
        x = draw.uniform(-5, 5, (self.tasks, self.shots + self.queries, 1))
        x, y = x.astype(np.float32), (amplitude * np.sin(x - phase)).astype(np.float32)
        return Episode(x[:, : self.shots], y[:, : self.shots], x[:, self.shots :], y[:, self.shots :])


def _stack(tasks: list[Episode]) -> Episode:
    return Episode(*(np.stack(field) for field in zip(*tasks, strict=True)))


def _check_counts(config: Any, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
