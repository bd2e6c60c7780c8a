"""Draws the diagrams of the documentation: `python docs/assets/draw.py` writes the SVG files beside it."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

HERE = Path(__file__).parent
BLUE, RED, GREEN, GREY, PINK = "#0072B2", "#D55E00", "#009E73", "#999999", "#CC79A7"
plt.rcParams.update({"font.size": 9, "svg.hashsalt": "bilax", "svg.fonttype": "path"})


def save(figure, name: str) -> None:
    figure.savefig(HERE / name, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def phi() -> None:
    """K follower steps from z on f(x, ·), F at each of them, and the step that is chosen."""
    x, alpha, steps = 3.0, 0.06, 12
    y = [1.3]
    for _ in range(steps):
        y.append(y[-1] + alpha * x * np.cos(x * y[-1]))
    y, grid = np.array(y), np.linspace(-2, 2, 400)
    upper = x + x * y
    best = 1 + int(np.argmax(upper[1:]))
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.1), layout="constrained")
    left.plot(grid, -np.sin(x * grid), color=GREY)
    left.plot(y, -np.sin(x * y), "o-", color=BLUE, ms=4, lw=1)
    left.plot(y[0], -np.sin(x * y[0]), "s", color=GREEN, ms=8)
    left.annotate(
        "z, where the follower starts",
        (y[0], -np.sin(x * y[0])),
        (-0.75, 1.32),
        color=GREEN,
        arrowprops={"arrowstyle": "-", "color": GREEN},
    )
    left.annotate("$y_K$", (y[-1], -np.sin(x * y[-1])), (y[-1] - 0.1, -1.3), color=BLUE)
    left.set(title="the follower descends f(x, ·) for K steps", xlabel="y", ylabel="f(x, y)", ylim=(-1.5, 1.6))
    right.plot(range(1, steps + 1), upper[1:], "o-", color=BLUE, ms=4)
    right.plot(best, upper[best], "*", color=RED, ms=15)
    right.annotate(
        r"$\bar k$: the worst for the leader", (best, upper[best]), (best + 0.8, upper[best] - 0.03), color=RED
    )
    right.plot(steps, upper[-1], "D", color=PINK, ms=8)
    right.annotate("RHG, IA-GM: $y_K$", (steps, upper[-1]), (steps - 4.4, upper[-1] + 0.35), color=PINK)
    right.set(title="F at each step: one of them is the value of φ", xlabel="k", ylabel="F(x, $y_k$)")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    save(figure, "phi.svg")


RULES = [
    ("Reverse()", "rhg, ia_gm, iaptt_gm", "exact: back over every step to z", range(8), False),
    ("Reverse(window=3)", "t_rhg", "back over the last 3 steps", range(5, 8), False),
    ("Forward()", "fhg", "the same derivative, carried along", range(8), True),
    ("Implicit(), Neumann()", "ls, ns, auto", "only the end: solve with the Hessian there", (), False),
    ("FirstOrder(), Displacement()", "fomaml, reptile", "no second derivatives at all", (), False),
]


def rules() -> None:
    """Which part of the follower's run each derivative rule goes back over."""
    figure, axes = plt.subplots(len(RULES), 1, figsize=(8.6, 4.6), layout="constrained")
    for axis, (rule, used_by, text, swept, forward) in zip(axes, RULES, strict=True):
        axis.set(xlim=(-5.4, 13.8), ylim=(-0.75, 0.8))
        axis.axis("off")
        axis.text(-5.4, 0.12, rule, weight="bold", va="center")
        axis.text(-5.4, -0.36, used_by, va="center", color=GREY)
        for k in range(9):
            axis.plot(k, 0, "o", ms=9, color=GREEN if k == 0 else BLUE, zorder=3)
            axis.text(k, -0.52, "z" if k == 0 else "$y_K$" if k == 8 else "", ha="center", va="center")
            if k < 8:
                axis.annotate("", (k + 0.85, 0), (k + 0.15, 0), arrowprops={"arrowstyle": "->", "color": GREY})
        for k in swept:
            ends = ((k + 0.9, 0.3), (k + 0.1, 0.3)) if forward else ((k + 0.1, 0.3), (k + 0.9, 0.3))
            axis.annotate("", *ends, arrowprops={"arrowstyle": "->", "color": RED, "lw": 1.8})
        if rule.startswith("Implicit"):
            axis.add_patch(plt.Circle((8, 0.02), 0.42, fill=False, color=RED, lw=1.8))
        axis.text(9.0, 0, text, va="center")
    save(figure, "rules.svg")


ROOMS = {
    "problem": ("Problem, sets,\nterms, checks", 0, 0, BLUE),
    "follower": ("dynamics,\ntrajectory", 1, 0, BLUE),
    "gradient": ("derivative\nrules, φ, tasks", 2, 0, BLUE),
    "methods": ("Algorithm,\nrecipes, auto", 3, 0, BLUE),
    "run": ("solve, the loop,\ncheckpoints", 4, 0, BLUE),
    "trust": ("certify, diagnose,\nsolve_global", 5, 0, BLUE),
    "datasets, models": ("by name; layers,\nnetworks", 0, 1.15, GREY),
    "sklearn": ("estimators", 1.6, 1.15, PINK),
    "cleaning": ("clean_labels", 3.4, 1.15, RED),
    "app": ("command line,\nreport, pictures", 5, 1.15, RED),
    "experiments": ("the paper,\nbenches", 2.5, 2.05, PINK),
}
"""what is in each, its place and its colour"""


def architecture() -> None:
    """The rooms of the package and which may import which, as tests/test_layout.py has it."""
    figure, axis = plt.subplots(figsize=(9.2, 4.9))
    figure.subplots_adjust(0, 0, 1, 1)
    axis.set(xlim=(-0.62, 5.62), ylim=(-1.05, 2.4))
    axis.axis("off")
    axis.add_patch(plt.Rectangle((-0.58, -0.4), 6.16, 0.93, fc="none", ec=BLUE, lw=0.9, ls=":"))
    axis.text(5.5, 0.42, "the library", color=BLUE, ha="right", va="center", fontsize=8.5)
    for name, (text, x, y, colour) in ROOMS.items():
        axis.add_patch(plt.Rectangle((x - 0.44, y - 0.28), 0.88, 0.56, fc="white", ec=colour, lw=1.6, zorder=2))
        axis.text(x, y + 0.15, name, ha="center", va="center", weight="bold", color=colour, zorder=3)
        axis.text(x, y - 0.09, text, ha="center", va="center", fontsize=8.5, zorder=3)

    def arrow(start, end, colour, line="-", bend=0.0):
        style = {"arrowstyle": "->", "color": colour, "lw": 1.4, "ls": line, "connectionstyle": f"arc3,rad={bend}"}
        axis.annotate("", end, start, arrowprops=style)

    for x in range(5):
        arrow((x + 0.58, 0), (x + 0.42, 0), BLUE)
    arrow((0, 0.9), (0, 0.26), GREY)
    for name, end in (("cleaning", 0.53), ("app", 0.53)):
        _, x, y, colour = ROOMS[name]
        arrow((x, y - 0.25), (x, end), colour)
    for name in ("sklearn", "experiments"):
        _, x, y, colour = ROOMS[name]
        arrow((x, y - 0.25), (x, 0.53), colour, "--")
    arrow((2.92, 2.05), (5, 1.4), PINK, bend=-0.2)
    arrow((2.08, 2.05), (1.6, 1.4), PINK, bend=0.2)
    axis.text(
        -0.58,
        -0.5,
        "An arrow points to what may be imported; between rooms of the library it reaches on to the left, but what\n"
        "is in run, solve aside, knows problem and the Algorithm protocol alone. Dashed: by the public names.\n"
        "Rooms in orange and experiments may import datasets and models, sklearn may import problem;\n"
        "files, which reads and writes, is below all.",
        fontsize=8.5,
        color="#555555",
        va="top",
    )
    save(figure, "architecture.svg")


def data_flow() -> None:
    """How one outer step goes: from (x, z) through the follower's run to the gradient and back."""
    boxes = [
        "x, z",
        "Problem.follower\nf(x, ·), F(x, ·), Y",
        "dynamics\n$y_1 … y_K$",
        "select\n$y_{\\bar k}$",
        "φ = F(x, $y_{\\bar k}$)",
    ]
    back = [None, None, "derivative rule\n∂φ/∂x, ∂φ/∂z", None, None]
    figure, axis = plt.subplots(figsize=(9.2, 2.3), layout="constrained")
    axis.set(xlim=(-0.5, 4.5), ylim=(-1.25, 0.45))
    axis.axis("off")
    for i, text in enumerate(boxes):
        axis.text(i, 0, text, ha="center", va="center", bbox={"fc": "white", "ec": BLUE, "boxstyle": "round,pad=0.5"})
        if i:
            axis.annotate("", (i - 0.36, 0), (i - 0.64, 0), arrowprops={"arrowstyle": "->", "color": BLUE})
    axis.text(2, -0.85, back[2], ha="center", va="center", bbox={"fc": "white", "ec": RED, "boxstyle": "round,pad=0.5"})
    axis.annotate(
        "",
        (2.45, -0.85),
        (4, -0.28),
        arrowprops={"arrowstyle": "->", "color": RED, "connectionstyle": "angle3,angleA=0,angleB=90"},
    )
    axis.text(
        0,
        -0.85,
        "optax step,\nprojection",
        ha="center",
        va="center",
        bbox={"fc": "white", "ec": GREEN, "boxstyle": "round,pad=0.5"},
    )
    axis.annotate("", (0.36, -0.85), (1.55, -0.85), arrowprops={"arrowstyle": "->", "color": RED})
    axis.annotate("", (0, -0.28), (0, -0.55), arrowprops={"arrowstyle": "->", "color": GREEN})
    save(figure, "step.svg")


if __name__ == "__main__":
    phi()
    rules()
    architecture()
    data_flow()
