"""The data of the experiments: found on this machine or fetched, and a person's own arrays."""

from bilax.datasets.arrays import Examples, read_npz
from bilax.datasets.idx import DataError, read_idx
from bilax.datasets.sources import SOURCES, find, load

__all__ = ["SOURCES", "DataError", "Examples", "find", "load", "read_idx", "read_npz"]
