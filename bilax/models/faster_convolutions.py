"""What makes networks faster and has to be said before JAX computes anything."""

import importlib.metadata
import os


def faster_convolutions() -> None:
    """Has XLA convolve on CPU by its newer library, on all cores: two thirds of the time. `bilax run few-shot` does so.

    It also has what is around the convolutions compiled by XLA's older emitters, without much optimisation: a step of a
    network takes as long, its compilation half as long and half the memory. Steps of many small operations would be
    some per cent slower.

    Call it before the first computation with JAX. That library multiplies the matrices of hyper-cleaning more slowly,
    so it is not for everything. It is off by default and its flag may go, which XLA would not forgive, so only the
    version that was measured (jaxlib 0.10) gets it; flags of your own in XLA_FLAGS are left alone.
    """
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        kinds = "LIBRARY_FUSION_TYPE_DOT,LIBRARY_FUSION_TYPE_REDUCE"
        quickly = "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=1"
        os.environ.setdefault("XLA_FLAGS", f"--xla_cpu_experimental_ynn_fusion_type={kinds} {quickly}")
