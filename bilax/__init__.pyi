from .app.pictures import basin_map, landscape, leader_path
from .cleaning.labels import CleanedLabels, clean_labels
from .follower.dynamics import (
    Aggregated,
    Dynamics,
    FromOptax,
    FromOptimistix,
    GradientDescent,
    Nesterov,
    residual,
)
from .follower.lbfgs import LBFGS
from .follower.learned import LearnedDescent
from .follower.newton import Newton
from .follower.several_starts import SeveralStarts
from .follower.trajectory import ArgMax, EveryStep, Last, pessimistic
from .gradient.first_order import Displacement, FiniteDifference, FirstOrder
from .gradient.implicit import Implicit, Neumann
from .gradient.method import Method
from .gradient.phi import Info, Phi, approximate
from .gradient.rule import Cotangents, Derivative, FollowerRun
from .gradient.tasks import Tasks
from .gradient.unrolled import Forward, Reverse
from .methods.adaptation import imaml, maml_pp, meta_sgd, t_net
from .methods.algorithm import Algorithm, Evaluation, evaluate
from .methods.auto import Auto, auto
from .methods.double_loop import amigo, bsa, mrbo, stocbio, sustain, ttsa
from .methods.first_order import bome, f2sa, f3sa, g_pbgd, meha, penalty, v_pbgd
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
from .methods.single_loop import fsla, ma_soba, saba, soba, srba
from .methods.value_function import ValueFunction, bvfim
from .methods.zeroth_order import pzobo
from .models.from_torch import from_torch, to_torch
from .problem.minibatches import Draws, Minibatches
from .problem.polyhedra import Affine, Halfspace, Hyperplane, Polyhedron
from .problem.problem import Follower, Problem
from .problem.proximity import near_leader
from .problem.sets import Ball, Box, Each, L1Ball, NonNegative, Product, Reals, SecondOrderCone, Set, Simplex
from .problem.terms import L1, ElasticNet, GroupL1, Lq, Term
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
    "L1",
    "LBFGS",
    "RECIPES",
    "Affine",
    "Aggregated",
    "Algorithm",
    "ArgMax",
    "Auto",
    "Ball",
    "BilevelError",
    "Box",
    "Candidate",
    "Certificate",
    "CleanedLabels",
    "ConfigurationError",
    "Cotangents",
    "Derivative",
    "Diagnosis",
    "Displacement",
    "Draws",
    "Dynamics",
    "Each",
    "EarlyStopping",
    "ElasticNet",
    "Evaluation",
    "EveryStep",
    "FiniteDifference",
    "FirstOrder",
    "Follower",
    "FollowerRun",
    "Forward",
    "FromOptax",
    "FromOptimistix",
    "GlobalSolution",
    "GradientCheck",
    "GradientDescent",
    "GroupL1",
    "Halfspace",
    "History",
    "Hyperplane",
    "Implicit",
    "Info",
    "Interrupted",
    "JsonLines",
    "L1Ball",
    "Last",
    "LearnedDescent",
    "Lq",
    "Method",
    "Minibatches",
    "Nesterov",
    "Neumann",
    "Newton",
    "NonNegative",
    "Phi",
    "Polyhedron",
    "Problem",
    "Product",
    "Reals",
    "Reverse",
    "RunOptions",
    "Saving",
    "SecondOrderCone",
    "Set",
    "SeveralStarts",
    "Simplex",
    "Snapshot",
    "Solution",
    "Status",
    "Tasks",
    "TensorBoard",
    "Term",
    "ValueFunction",
    "Verdict",
    "__version__",
    "amigo",
    "approximate",
    "auto",
    "basin_map",
    "bda",
    "bome",
    "bsa",
    "bvfim",
    "certify",
    "check_hypergradient",
    "clean_labels",
    "diagnose",
    "evaluate",
    "f2sa",
    "f3sa",
    "fhg",
    "fomaml",
    "from_torch",
    "fsla",
    "g_pbgd",
    "ia_gm",
    "ia_gm_a",
    "iaptt_gm",
    "imaml",
    "landscape",
    "leader_path",
    "ls",
    "ma_soba",
    "maml",
    "maml_pp",
    "meha",
    "meta_sgd",
    "mrbo",
    "multistart",
    "near_leader",
    "ns",
    "one_step",
    "penalty",
    "pessimistic",
    "pzobo",
    "reptile",
    "residual",
    "rhg",
    "saba",
    "soba",
    "solve",
    "solve_global",
    "srba",
    "stocbio",
    "sustain",
    "t_net",
    "t_rhg",
    "to_torch",
    "ttsa",
    "v_pbgd",
]
