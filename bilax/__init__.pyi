from .app.pictures import basin_map, landscape, leader_path
from .follower.dynamics import Aggregated, Dynamics, FromOptax, GradientDescent, Nesterov, residual
from .follower.trajectory import ArgMax, Last, pessimistic
from .gradient.first_order import Displacement, FiniteDifference, FirstOrder
from .gradient.implicit import Implicit, Neumann
from .gradient.method import Method
from .gradient.phi import Info, Phi, approximate
from .gradient.rule import Cotangents, Derivative, FollowerRun
from .gradient.tasks import Tasks
from .gradient.unrolled import Forward, Reverse
from .methods.algorithm import Algorithm, Evaluation, evaluate
from .methods.recipes import (
    RECIPES,
    bda,
    fhg,
    fomaml,
    ia_gm,
    ia_gm_a,
    iaptt_gm,
    ls,
    maml,
    ns,
    one_step,
    reptile,
    rhg,
    t_rhg,
)
from .methods.value_function import ValueFunction, bvfim, penalty
from .problem.problem import Follower, Problem
from .problem.sets import Ball, Box, NonNegative, Reals, Set, Simplex
from .run.callbacks import EarlyStopping, JsonLines, Snapshot, TensorBoard
from .run.checkpoint import ConfigurationError, Saving
from .run.options import RunOptions
from .run.solution import BilevelError, History, Interrupted, Solution, Status
from .run.solve import multistart, solve
from .trust.certificate import Certificate, Verdict, certify
from .trust.diagnosis import Diagnosis, diagnose
from .trust.global_search import Candidate, GlobalSolution, solve_global
from .trust.gradient_check import GradientCheck, check_hypergradient

__version__: str

__all__ = [
    "RECIPES",
    "Aggregated",
    "Algorithm",
    "ArgMax",
    "Ball",
    "BilevelError",
    "Box",
    "Candidate",
    "Certificate",
    "ConfigurationError",
    "Cotangents",
    "Derivative",
    "Diagnosis",
    "Displacement",
    "Dynamics",
    "EarlyStopping",
    "Evaluation",
    "FiniteDifference",
    "FirstOrder",
    "Follower",
    "FollowerRun",
    "Forward",
    "FromOptax",
    "GlobalSolution",
    "GradientCheck",
    "GradientDescent",
    "History",
    "Implicit",
    "Info",
    "Interrupted",
    "JsonLines",
    "Last",
    "Method",
    "Nesterov",
    "Neumann",
    "NonNegative",
    "Phi",
    "Problem",
    "Reals",
    "Reverse",
    "RunOptions",
    "Saving",
    "Set",
    "Simplex",
    "Snapshot",
    "Solution",
    "Status",
    "Tasks",
    "TensorBoard",
    "ValueFunction",
    "Verdict",
    "__version__",
    "approximate",
    "basin_map",
    "bda",
    "bvfim",
    "certify",
    "check_hypergradient",
    "diagnose",
    "evaluate",
    "fhg",
    "fomaml",
    "ia_gm",
    "ia_gm_a",
    "iaptt_gm",
    "landscape",
    "leader_path",
    "ls",
    "maml",
    "multistart",
    "ns",
    "one_step",
    "penalty",
    "pessimistic",
    "reptile",
    "residual",
    "rhg",
    "solve",
    "solve_global",
    "t_rhg",
]
