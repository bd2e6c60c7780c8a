"""The data of the experiments: found on this machine or fetched, and a person's own arrays."""

from bilax.datasets.examples import Examples, read_npz
from bilax.datasets.idx import read_idx
from bilax.datasets.registry import DATA_SETS, DataSet, find, load, load_classes
from bilax.files import DataError

__all__ = ["DATA_SETS", "DataError", "DataSet", "Examples", "find", "load", "load_classes", "read_idx", "read_npz"]
